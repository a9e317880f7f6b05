#pragma once
// Knows, on a thread, that an input of a region is being saved, and which tensor its alias stands for.

#include <ATen/core/Tensor.h>

namespace remat {

/// The tensor whose alias is being packed, else null. A region around judges the alias by it.
const at::Tensor* input_being_saved();
/// Returns the same to a frame that makes a slot of it, or fills one with it.
const at::Tensor* take_input_being_saved();

/// While alive, what this thread saves is an alias of `tensor`: an input of a region, or a kept value.
class SavingInput {
 public:
  explicit SavingInput(const at::Tensor& tensor);
  ~SavingInput();
  SavingInput& operator=(SavingInput&&) = delete;
  /// Whether a region around has made a slot of it.
  bool is_slot() const { return is_slot_; }

 private:
  friend const at::Tensor* input_being_saved();
  friend const at::Tensor* take_input_being_saved();
  const at::Tensor* const tensor_;
  SavingInput* const previous_;
  bool is_slot_ = false;
};

}  // namespace remat
