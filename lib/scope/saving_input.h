#pragma once
// Tracks that an input of a region is being saved on a thread, and the tensor for which its alias
// stands.

#include <ATen/core/Tensor.h>

namespace remat {

class SlotFiller;  // hooks/pack/slot.h

/// Returns the tensor whose alias is being packed, or null. A region around judges the alias by it.
const at::Tensor* input_being_saved();
/// Returns the same tensor to a frame that makes a slot of it or fills a slot with it, and notes
/// that.
const at::Tensor* take_input_being_saved();

/// Defers the stop of a recompute until the inputs of a region that is about to run are saved.
/// Returns true in that case, and the function that saves the inputs calls the filler's `stop`;
/// otherwise returns false.
bool stop_after_inputs(SlotFiller& filler);

/// Marks tensors that this thread saves as aliases of `tensor`, an input of a region or a kept
/// value, while alive.
class SavingInput {
 public:
  /// `stops_later` receives the filler of a recompute that ends here; if null, it may end in the
  /// hook.
  explicit SavingInput(const at::Tensor& tensor, SlotFiller** stops_later = nullptr);
  ~SavingInput();
  SavingInput& operator=(SavingInput&&) = delete;
  /// Returns whether a region around has made a slot of it.
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
