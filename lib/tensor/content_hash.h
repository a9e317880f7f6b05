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
/// Whether its class has the elements in other tensors, as wrappers of Python's have, or none, as
/// fake tensors have. They are not compared: `content_hash` is the same of all of one dtype.
bool has_no_memory(const at::Tensor& tensor);
/// Writes the hash as text, of 16 hexadecimal digits.
std::string text_of_contents(const at::Tensor& tensor);

}  // namespace remat
