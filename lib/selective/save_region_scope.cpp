#include "lib/selective/save_region_scope.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "hooks/pack/inspection.h"
#include "lib/frame/frame.h"
#include "lib/scope/saving_input.h"
#include "lib/seam/autograd_meta.h"
#include "lib/seam/own_hooks.h"
#include "lib/seam/plain_tensor.h"

namespace remat {

using torch::autograd::SavedVariable;
using torch::autograd::SavedVariableHooks;

namespace {
/// Returns the version of a tensor; 0 for one that has none.
uint32_t version_if_any(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.is_inference() ? 0 : seam::version_of(tensor);
}
}  // namespace

class SavedInside {
 public:
  /// Holds a tensor that lies in an argument.
  SavedInside(const at::Tensor& saved, InArgument place)
      : held_(seam::alias_without_history(saved)),
        version_(seam::version_of(saved)),
        place_(std::move(place)) {}
  /// Holds any other tensor as the hooks around the region do.
  explicit SavedInside(std::unique_ptr<SavedVariable> around) : around_(std::move(around)) {}

  /// Makes it a slot of the region. `argument`: the argument in which the tensor lies. Returns
  /// false if the region has no hooks here.
  bool make_slot(FrameScope& region, const at::Tensor& argument) {
    auto hooks = region.make_hooks();
    if (hooks == nullptr) return false;
    const SavingInput saving(argument);
    hooks->call_pack_hook(held_);
    slot_ = std::move(hooks);
    held_.reset();
    return true;
  }
  const InArgument& place() const { return *place_; }

  at::Tensor unpack() const {
    if (slot_ != nullptr) return slot_->call_unpack_hook();
    if (around_ != nullptr) return around_->unpack();
    TORCH_CHECK(Inspection::current() != nullptr || seam::version_of(held_) == version_,
                "remat::save_region: one of the variables needed for gradient computation has been "
                "modified by an inplace operation: an argument that the function saved is at "
                "version ",
                seam::version_of(held_), "; expected version ", version_,
                " instead.\nHint: use the out-of-place operator, or pass a copy of the argument.");
    return held_;
  }

 private:
  at::Tensor held_;
  uint32_t version_ = 0;
  std::optional<InArgument> place_;
  std::unique_ptr<SavedVariable> around_;
  std::unique_ptr<SavedVariableHooks> slot_;
};

class SavedInsideHook final : public seam::OwnHooks {
 public:
  explicit SavedInsideHook(SaveRegionScope& scope) : scope_(&scope) {}
  void call_pack_hook(const at::Tensor& saved) override {
    SaveRegionScope& scope = *std::exchange(scope_, nullptr);
    // A leaf outlives its graph.
    auto place =
        leaf_behind(saved) == nullptr ? InArgument::find(saved, scope.arguments_) : std::nullopt;
    if (!place) {
      saved_ = std::make_shared<SavedInside>(scope.save_around(saved));
      return;
    }
    saved_ = std::make_shared<SavedInside>(saved, std::move(*place));
    scope.in_arguments_.push_back(saved_);
  }
  at::Tensor call_unpack_hook() override { return saved_->unpack(); }

 private:
  void refuse_tracing() const override {
    TORCH_CHECK(Inspection::current() != nullptr,
                "remat::save_region: compiled autograd cannot trace a region. Hint: run backward "
                "without it.");
  }
  SaveRegionScope* scope_;
  std::shared_ptr<SavedInside> saved_;
};

SaveRegionScope::SaveRegionScope(FrameScope& region, std::vector<at::Tensor> arguments)
    : RegionScope(region.region()), region_(region), arguments_(std::move(arguments)) {
  is_save_region = true;
  is_recompute = region.is_recompute;
  is_inside_recompute = region.is_inside_recompute;
  for (const at::Tensor& each : arguments_) versions_.push_back(version_if_any(each));
  answers(detail::Ability::Hooks);
}

SaveRegionScope::~SaveRegionScope() = default;

std::unique_ptr<SavedVariableHooks> SaveRegionScope::make_hooks() {
  // The input of a region inside is held as that region's inputs are.
  if (region_.is_recompute || arguments_.empty() || input_being_saved() != nullptr)
    return make_hooks_for(detail::HooksAround::All);
  return std::make_unique<SavedInsideHook>(*this);
}

std::unique_ptr<SavedVariableHooks> SaveRegionScope::make_hooks_for(detail::HooksAround which) {
  return region_.is_recompute ? nullptr : detail::make_hooks_around(region_, which);
}

// An output of the node that saves it would keep that node alive, so it is saved without history.
std::unique_ptr<SavedVariable> SaveRegionScope::save_around(const at::Tensor& saved) const {
  const detail::SaveAround around(region_, detail::HooksAround::All);
  if (seam::node_of(saved) == nullptr)
    return std::make_unique<SavedVariable>(saved, /*is_output=*/false);
  const SavingInput saving(saved);
  return std::make_unique<SavedVariable>(seam::alias_without_history(saved), /*is_output=*/false);
}

bool SaveRegionScope::has_written() const {
  for (std::size_t i = 0; i < arguments_.size(); ++i)
    if (version_if_any(arguments_[i]) != versions_[i]) return true;
  return false;
}

std::vector<InArgument> SaveRegionScope::make_slots() {
  std::vector<InArgument> places;
  for (const std::weak_ptr<SavedInside>& each : in_arguments_)
    if (const auto saved = each.lock();
        saved != nullptr && saved->make_slot(region_, arguments_[saved->place().argument()]))
      places.push_back(saved->place());
  return places;
}

}  // namespace remat
