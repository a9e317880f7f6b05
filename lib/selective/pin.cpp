// Definitions of policy.h that run inside a region: checkpoint_name, pin, save_region.

#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "lib/frame/frame_scope.h"
#include "lib/seam/dispatch_mode.h"
#include "lib/selective/replay.h"
#include "lib/selective/selection.h"
#include "remat/policy.h"

namespace remat {

namespace {

/// Registers the operator that stands for names in questions to policies. It is never called.
const bool is_name_registered = [] {
  if (c10::Dispatcher::singleton().findSchema({"remat::checkpoint_name", ""})) return true;
  static auto* const library =  // leaked: handles to the operator may outlive static destruction
      new torch::Library(torch::Library::FRAGMENT, "remat", std::nullopt, __FILE__, __LINE__);
  library->def("checkpoint_name(Tensor x, str name) -> Tensor");
  return true;
}();

/// Returns the innermost region, if this thread belongs to it and is not inside save_region;
/// otherwise null.
FrameScope* region_here() {
  detail::RegionScope* const region = detail::innermost_region();
  if (region == nullptr || region->is_save_region || !region->is_own_thread()) return nullptr;
  return static_cast<FrameScope*>(region);
}

/// Returns the edges of the node that made a tensor. A kept alias of the tensor has them: not the
/// tensor's own node, which may depend on a changed tensor.
torch::autograd::edge_list edges_below(const at::Tensor& tensor) {
  if (!has_gradient_edge(tensor)) return {};
  return torch::autograd::impl::gradient_edge(tensor).function->next_edges();
}

/// The scope of save_region() while its function runs in forward: saved tensors pass the enclosing
/// hooks.
class SaveRegionScope final : public detail::RegionScope {
 public:
  explicit SaveRegionScope(detail::RegionScope& region)
      : RegionScope(region.region()), region_(region) {
    is_save_region = true;
    is_recompute = region.is_recompute;
    is_inside_recompute = region.is_inside_recompute;
    answers(detail::Ability::Hooks);
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    return make_hooks_for(detail::HooksAround::All);
  }
  /// Uses enclosing hooks only: the region's own slot would stay empty, since its recomputes do not
  /// run the function.
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks_for(
      detail::HooksAround which) override {
    return region_.is_recompute ? nullptr : detail::make_hooks_around(region_, which);
  }
  bool is_own_thread() const override { return true; }

 private:
  detail::RegionScope& region_;
};

}  // namespace

at::Tensor checkpoint_name(const at::Tensor& x, std::string name) {
  FrameScope* const region = region_here();
  if (region == nullptr || !x.defined()) return x;
  Selection* const selection = Selection::of(region->frame());
  if (selection == nullptr || !selection->looks_at_names()) return x;
  const seam::DispatchModeOff unseen;  // results on the CPU are copied
  if (region->is_recompute) {
    Replay& replay = *Replay::of(*region);
    const PinRecord* const kept = replay.next_pin(typeid(at::Tensor), &x);
    return kept == nullptr ? x : replay.values_of(*kept, edges_below(x)).front();
  }
  selection->name(x, name, *region);
  return x;
}

at::Tensor pin(const at::Tensor& x) {
  FrameScope* const region = region_here();
  if (region == nullptr || !x.defined()) return x;
  const seam::DispatchModeOff unseen;
  if (region->is_recompute) {
    Replay* const replay = Replay::of(*region);
    const PinRecord* const kept =
        replay == nullptr ? nullptr : replay->next_pin(typeid(at::Tensor));
    return kept == nullptr ? x : replay->values_of(*kept, edges_below(x)).front();
  }
  Selection& selection = Selection::make(region->frame());
  keep_itself(selection, x, selection.begin_pin(), *region, {}, /*is_name=*/false);
  selection.tensor_was_read(x);
  return x;
}

namespace detail {

struct SavedRegion::Impl {
  FrameScope* region = nullptr;
  const std::type_info* type = nullptr;
  int64_t number = -1;
  DrawMarks marks;
  torch::autograd::edge_list read;  // in a recompute: the edges of the arguments
  std::vector<std::pair<c10::VariableVersion, uint32_t>> versions;  // those of the arguments
  std::shared_ptr<SaveRegionScope> scope;
  const PinRecord* kept = nullptr;
};

SavedRegion::SavedRegion(const std::type_info& type,
                         c10::function_ref<void(TensorVisitor)> visit_arguments) {
  FrameScope* const region = region_here();
  if (region == nullptr) return;
  impl_ = std::make_unique<Impl>();
  impl_->region = region;
  impl_->type = &type;
  if (region->is_recompute) {
    if (Replay* const replay = Replay::of(*region)) impl_->kept = replay->next_pin(type);
    if (impl_->kept != nullptr) {
      region->move_providers(impl_->kept->states);
      visit_arguments([this](at::Tensor& tensor) {
        if (tensor.defined() && has_gradient_edge(tensor))
          impl_->read.push_back(torch::autograd::impl::gradient_edge(tensor));
      });
      return;
    }
  } else {
    Selection& selection = Selection::make(region->frame());
    impl_->number = selection.begin_pin();
    impl_->marks = region->frame().surroundings().marks();
    visit_arguments([this](at::Tensor& tensor) {
      if (!tensor.defined() || tensor.is_inference()) return;
      const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
      impl_->versions.emplace_back(counter, counter.current_version());
    });
  }
  impl_->scope = std::make_shared<SaveRegionScope>(*region);
  push(impl_->scope);
}

SavedRegion::~SavedRegion() {
  if (impl_ != nullptr && impl_->scope != nullptr) pop(*impl_->scope);
}

bool SavedRegion::is_kept() const { return impl_ != nullptr && impl_->kept != nullptr; }

void* SavedRegion::emptied() const { return impl_->kept->emptied.get(); }

std::vector<at::Tensor> SavedRegion::tensors() {
  const seam::DispatchModeOff unseen;
  return Replay::of(*impl_->region)->values_of(*impl_->kept, impl_->read);
}

void SavedRegion::keep(std::shared_ptr<void> emptied,
                       c10::function_ref<void(TensorVisitor)> visit_tensors) {
  if (impl_ == nullptr) return;
  pop(*std::exchange(impl_->scope, nullptr));
  if (impl_->number < 0) return;
  // A function that writes to its argument must do so in recomputes, too: its values are not kept.
  if (std::any_of(impl_->versions.begin(), impl_->versions.end(),
                  [](const auto& each) { return each.first.current_version() != each.second; }))
    return;
  const seam::DispatchModeOff unseen;
  Selection& selection = *Selection::of(impl_->region->frame());
  auto kept = std::make_shared<PinRecord>();
  kept->type = impl_->type;
  DevicesMet met = impl_->region->frame().devices_met();
  visit_tensors([&met](const at::Tensor& value) { met.add(value); });
  kept->draws = impl_->region->frame().surroundings().since(impl_->marks, met);
  if (const UserState* const state = impl_->region->frame().surroundings().user_state())
    kept->states = state->states_now();
  visit_tensors([&](at::Tensor& place) {
    const at::Tensor value = std::exchange(place, at::Tensor());
    kept->values.push_back(
        selection.keep_value(value, impl_->number, kept->values.size(), *impl_->region));
    if (value.defined()) selection.tensor_was_read(value);
    kept->values.back().had_hooks =
        value.defined() && has_gradient_edge(value) && !torch::autograd::impl::hooks(value).empty();
  });
  kept->emptied = std::move(emptied);
  selection.keep_pin(impl_->number, std::move(kept));
}

}  // namespace detail
}  // namespace remat
