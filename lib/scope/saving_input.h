#pragma once
// Knows, on a thread, that an input of a region is being saved, and which tensor its alias stands
// for.

#include <ATen/core/Tensor.h>

namespace remat {

class SlotFiller;  // hooks/pack/slot.h

/// The tensor whose alias is being packed, else null. A region around judges the alias by it.
const at::Tensor* input_being_saved();
/// Returns the same to a frame that makes a slot of it, or fills one with it.
const at::Tensor* take_input_being_saved();

/// Where that is an input of a region that is about to run in a recompute, the recompute may end
/// when the inputs are saved: returns true, and whoever saves them calls the filler's `stop`. Else
/// false.
bool stop_after_inputs(SlotFiller& filler);

/// While alive, what this thread saves is an alias of `tensor`: an input of a region, or a kept
/// value.
class SavingInput {
 public:
  /// `stops_later` is told of a recompute that ends here; null: it may end in the hook.
  explicit SavingInput(const at::Tensor& tensor, SlotFiller** stops_later = nullptr);
  ~SavingInput();
  SavingInput& operator=(SavingInput&&) = delete;
  /// Whether a region around has made a slot of it.
  bool is_slot() const { return is_slot_; }

 private:
  friend const at::Tensor* input_being_saved();
  friend const at::Tensor* take_input_being_saved();
  friend bool stop_after_inputs(SlotFiller& filler);
  const at::Tensor* const tensor_;
  SlotFiller** const stops_later_;
  SavingInput* const previous_;
  bool is_slot_ = false;
};

}  // namespace remat
