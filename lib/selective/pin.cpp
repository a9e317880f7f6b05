// Definitions of policy.h that run inside a region: checkpoint_name, pin, save_region.

#include <c10/util/ScopeExit.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "lib/frame/frame_scope.h"
#include "lib/seam/dispatch_mode.h"
#include "lib/selective/replay.h"
#include "lib/selective/save_region_scope.h"
#include "lib/selective/selection.h"
#include "remat/policy.h"

namespace remat {

namespace {

/// Registers the operators that stand for names in questions to policies. They are never called.
const bool is_name_registered = [] {
  if (c10::Dispatcher::singleton().findSchema({"remat::checkpoint_name", ""})) return true;
  static auto* const library =  // leaked: handles to the operator may outlive static destruction
      new torch::Library(torch::Library::FRAGMENT, "remat", std::nullopt, __FILE__, __LINE__);
  library->def("checkpoint_name(Tensor x, str name) -> Tensor");
  library->def("save_region(Tensor[] arguments, str name) -> Tensor[]");
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

}  // namespace

at::Tensor checkpoint_name(const at::Tensor& x, std::string name) {
  FrameScope* const region = region_here();
  if (region == nullptr || !x.defined()) return x;
  Selection* const selection = Selection::of(region->frame());
  if (selection == nullptr || selection->rule() == nullptr || !selection->rule()->looks_at_names())
    return x;
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
  CheckpointPolicy answer = CheckpointPolicy::MustSave;
  DrawMarks marks;
  std::vector<at::Tensor> arguments;
  std::shared_ptr<SaveRegionScope> scope;
  const PinRecord* kept = nullptr;

  /// Returns false if the function runs as a part of the region.
  bool begin_forward(const std::string& name) {
    Selection& selection = Selection::make(region->frame());
    number = selection.begin_pin();
    {
      const seam::DispatchModeOff unseen;
      answer = answer_for_region(selection.rule(), name, arguments);
    }
    if (is_keeping(answer)) {
      marks = region->frame().surroundings().marks();
      return true;
    }
    auto plain = std::make_shared<PinRecord>();
    plain->type = type;
    plain->is_let_go = plain->is_plain = true;
    selection.keep_pin(number, std::move(plain));
    return false;
  }

  bool begin_recompute() {
    Replay* const replay = Replay::of(*region);
    const PinRecord* const pin = replay == nullptr ? nullptr : replay->next_pin(*type);
    if (pin == nullptr) return true;
    if (pin->is_plain) return false;
    const seam::DispatchModeOff unseen;
    replay->fill_slots(*pin, *region, arguments);
    if (!pin->is_let_go) kept = pin;
    return true;
  }
};

SavedRegion::SavedRegion(const std::string& name, const std::type_info& type,
                         c10::function_ref<void(TensorVisitor)> visit_arguments) {
  FrameScope* const region = region_here();
  if (region == nullptr) return;
  auto impl = std::make_unique<Impl>();
  impl->region = region;
  impl->type = &type;
  visit_arguments([&](at::Tensor& tensor) { impl->arguments.push_back(tensor); });
  if (!(region->is_recompute ? impl->begin_recompute() : impl->begin_forward(name))) return;
  impl_ = std::move(impl);
  if (impl_->kept != nullptr) {
    region->move_providers(impl_->kept->states);
    return;
  }
  impl_->scope = std::make_shared<SaveRegionScope>(
      *region,
      region->is_recompute ? std::vector<at::Tensor>() : std::exchange(impl_->arguments, {}));
  push(impl_->scope);
}

SavedRegion::~SavedRegion() {
  if (impl_ == nullptr || impl_->scope == nullptr) return;
  pop(*impl_->scope);
  impl_->scope->release();
}

bool SavedRegion::is_kept() const { return impl_ != nullptr && impl_->kept != nullptr; }

void* SavedRegion::emptied() const { return impl_->kept->emptied.get(); }

std::vector<at::Tensor> SavedRegion::tensors() {
  const seam::DispatchModeOff unseen;
  torch::autograd::edge_list read;
  for (const at::Tensor& each : impl_->arguments)
    if (each.defined() && has_gradient_edge(each))
      read.push_back(torch::autograd::impl::gradient_edge(each));
  return Replay::of(*impl_->region)->values_of(*impl_->kept, std::move(read), impl_->arguments);
}

void SavedRegion::keep(std::shared_ptr<void> emptied,
                       c10::function_ref<void(TensorVisitor)> visit_tensors) {
  if (impl_ == nullptr) return;
  FrameScope& region = *impl_->region;
  const auto scope = std::exchange(impl_->scope, nullptr);
  pop(*scope);
  const auto released = c10::make_scope_exit([&] { scope->release(); });
  if (impl_->number < 0) return;
  // A function that writes to its argument must do so in recomputes, too: its values are not kept.
  if (scope->has_written()) return;
  const seam::DispatchModeOff unseen;
  Selection& selection = *Selection::of(region.frame());
  auto kept = std::make_shared<PinRecord>();
  kept->type = impl_->type;
  kept->is_region = true;
  DevicesMet met = region.frame().devices_met();
  visit_tensors([&met](const at::Tensor& value) { met.add(value); });
  kept->draws = region.frame().surroundings().since(impl_->marks, met);
  if (const UserState* const state = region.frame().surroundings().user_state())
    kept->states = state->states_now();
  visit_tensors([&](at::Tensor& place) {
    const at::Tensor value = std::exchange(place, at::Tensor());
    if (auto argument = InArgument::find(value, scope->arguments()))
      kept->values.push_back(
          {.tensor = {}, .role = grad_role_of(value), .argument = std::move(argument)});
    else
      kept->values.push_back(selection.keep_value(value, impl_->number, kept->values.size(), region,
                                                  selection.place_of(value, impl_->answer)));
    if (value.defined()) selection.tensor_was_read(value);
    kept->values.back().had_hooks =
        value.defined() && has_gradient_edge(value) && !torch::autograd::impl::hooks(value).empty();
  });
  kept->emptied = std::move(emptied);
  kept->saved_arguments = scope->make_slots();
  selection.keep_pin(impl_->number, std::move(kept));
}

}  // namespace detail
}  // namespace remat
