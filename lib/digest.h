#pragma once
// A 64-bit hash of a tensor's contents, for DeterminismCheck::Values.

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace remat {

/// Of dtype, sizes and element bytes in logical order, so of no strides; equal NaN bits are equal.
/// Sparse tensors: of their indices and values. Copies a tensor that is not contiguous on the CPU.
uint64_t digest_of(const at::Tensor& tensor);

}  // namespace remat
