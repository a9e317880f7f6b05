#pragma once
// Version counters of values that operators have written to.

#include <ATen/core/Tensor.h>

namespace remat::budget {

/// Notes that an operator of this thread writes to the tensor. LibTorch moves the version counter
/// after the operator.
void note_written(const at::Tensor& tensor);

/// Gives the noted values the present positions of their counters. All operators so far have
/// returned.
void settle_versions();

}  // namespace remat::budget
