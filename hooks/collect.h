#pragma once
// A frame's recompute hook: fills slots; keeps the tensor for the recomputed graph's own use.

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "hooks/slot.h"

namespace remat {

class Collect final : public torch::autograd::SavedVariableHooks {
 public:
  /// `filler` is used by the pack call, which follows at once, and while its function runs.
  explicit Collect(SlotFiller& filler) : filler_(&filler) {}

  void call_pack_hook(const at::Tensor& saved) override {
    if (!filler_->fill(saved, kept_)) filler_->stop();
  }
  at::Tensor call_unpack_hook() override {
    if (filler_ == SlotFiller::running()) filler_->stop_before_read();
    return kept_;
  }

 private:
  SlotFiller* filler_;
  at::Tensor kept_;
};

}  // namespace remat
