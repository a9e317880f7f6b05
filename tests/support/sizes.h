#pragma once
// Sizes of tensors in tests, and their bytes.

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace remat::testing {

inline constexpr int64_t tensor_side = 256;
inline constexpr int64_t tensor_bytes =
    tensor_side * tensor_side * 4;  ///< of one float tensor (tensor_side, tensor_side)

/// Elements for which a stop is worth its throw; below a few thousand a tail may run to its end.
inline constexpr int64_t large = 1'000'000;

inline int64_t bytes_of(const at::Tensor& t) { return static_cast<int64_t>(t.nbytes()); }

}  // namespace remat::testing
