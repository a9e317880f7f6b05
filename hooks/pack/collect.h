#pragma once
// A frame's recompute hook: fills slots; keeps the tensor for the recomputed graph's own use.

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "hooks/pack/slot.h"
#include "lib/seam/autograd_meta.h"

namespace remat {

/// Note [Changed before it is read]
/// A function can read in the same run what its graph saved: it takes a gradient, it looks into a
/// node, or a region inside runs again for one of these. LibTorch looks at no version of what comes
/// from hooks, and a region's argument that its function writes to is such a tensor. Forward is
/// given what it saved by a recompute; a recompute has only what it kept, which is compared here.
class Collect final : public torch::autograd::SavedVariableHooks {
 public:
  /// `filler` is used by the pack call, which follows at once, and while its function runs.
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
          " instead.\nCause: the region's function, or that of a region inside, changes it in "
          "place and then needs it as it was.\nHint: use the out-of-place operator there, or set "
          "inputs = remat::InputMode::CopyOnWrite in CheckpointOptions of a region whose argument "
          "it is.");
    }
    return kept_.tensor;
  }

 private:
  SlotFiller* filler_;
  Kept kept_;
};

}  // namespace remat
