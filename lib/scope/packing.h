#pragma once
// Tracks whether a user's pack function runs inside a region on a thread.

#include <ATen/core/Tensor.h>

namespace remat {

/// Marks that a pack function runs. The pack function may read its argument without an operator, so
/// the argument counts as read. No results of operators in the pack function are kept; its calls
/// are counted as usual.
class Packing {
 public:
  explicit Packing(const at::Tensor& saved);
  ~Packing();
  Packing& operator=(Packing&&) = delete;
  static bool is_under_way();
};

}  // namespace remat
