#pragma once
// Version counters that LibTorch counts up after an operator has written.

#include <ATen/core/Tensor.h>

namespace remat::budget {

/// An operator of this thread writes to the tensor: its version counter moves when the operator has
/// returned, and the value in its storage then goes by where it stands.
void note_written(const at::Tensor& tensor);

/// The operators of this thread so far have returned: takes note of where those counters stand.
void settle_versions();

}  // namespace remat::budget
