#pragma once
// A frame's recompute hook: fills slots, and keeps the tensor for the recomputed graph's own reads.

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "hooks/pack/slot.h"
#include "lib/seam/autograd_meta.h"

namespace remat {

/// Note [Changed before it is read]
/// A function can read its graph's saved tensors in the same run: it takes a gradient, it inspects
/// a node, or an inner region runs again for one of these. LibTorch checks no version of tensors
/// that come from hooks. A region's argument that its function changes in place is such a tensor.
/// In forward, a recompute provides the saved values. A recompute has only the tensor that it kept,
/// whose version is compared here.
class Collect final : public torch::autograd::SavedVariableHooks {
 public:
  /// Makes a hook. `filler` is used by the pack call, which follows at once, and while its function
  /// runs.
  explicit Collect(SlotFiller& filler) : filler_(&filler) {}

  void call_pack_hook(const at::Tensor& saved) override {
    const bool goes_on = filler_->fill(saved, kept_);
    kept_.version = seam::version_of(kept_.tensor);
    if (!goes_on) filler_->stop();
  }
  at::Tensor call_unpack_hook() override {
    const bool is_running = filler_ == SlotFiller::running();
    if (is_running) filler_->stop_before_read();
    if (seam::version_of(kept_.tensor) != kept_.version) {
      if (is_running) filler_->refuse_changed(kept_);
      TORCH_CHECK(
          false,
          "remat::checkpoint: one of the variables needed for gradient computation has been "
          "modified by an inplace operation: a tensor that a recompute saved is at version ",
          kept_.tensor._version(), "; expected version ", kept_.version,
          " instead.\n"
          "Cause: the region's function, or the function of an inner region, changes it in place "
          "and then needs its former values.\n"
          "Hint: use the out-of-place operator there; if the tensor is an argument of a region, "
          "set inputs = remat::InputMode::CopyOnWrite in CheckpointOptions of that region.");
    }
    return kept_.tensor;
  }

 private:
  SlotFiller* filler_;
  Kept kept_;
};

}  // namespace remat
