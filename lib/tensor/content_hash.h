#pragma once
// A 64-bit hash of a tensor's contents, for DeterminismCheck::Values.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace remat {

/// The hash covers dtype, sizes and element bytes; equal NaN bits are equal. Compare only tensors
/// of equal strides (which `Values` requires): one that is dense but not contiguous is taken as it
/// lies in memory. Sparse tensors: of their indices and values. Copies what is not dense, or not on
/// the CPU.
uint64_t content_hash(const at::Tensor& tensor);
/// Writes the hash as text, of 16 hexadecimal digits.
std::string text_of_contents(const at::Tensor& tensor);

}  // namespace remat
