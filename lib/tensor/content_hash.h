#pragma once
// A 64-bit hash of a tensor's contents, for DeterminismCheck::Values.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace remat {

/// Returns a hash of dtype, sizes and element bytes; equal NaN bits are equal. Compare only tensors
/// of equal strides (which `Values` requires): a tensor that is dense but not contiguous is hashed
/// in memory order. For sparse tensors, indices and values are hashed. Copies tensors that are not
/// dense, or not on the CPU.
uint64_t content_hash(const at::Tensor& tensor);
/// Returns whether the tensor's class has its elements in other tensors, like Python wrappers, or
/// has none, like fake tensors. These are not compared: `content_hash` is the same for all of one
/// dtype.
bool has_no_memory(const at::Tensor& tensor);
/// Returns the hash as text of 16 hexadecimal digits.
std::string text_of_contents(const at::Tensor& tensor);

}  // namespace remat
