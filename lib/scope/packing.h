#pragma once
// Tracks whether a user's pack function runs inside a region on a thread.

#include <ATen/core/Tensor.h>

namespace remat {

/// Marks that a pack function runs. The pack function may read its argument and tensors made from
/// it without an operator, and so may the unpack function: a placeholder would not do. So the
/// argument counts as read, and no results of operators in the pack function are kept. Its calls
/// are counted as usual.
class Packing {
 public:
  explicit Packing(const at::Tensor& saved);
  ~Packing();
  Packing& operator=(Packing&&) = delete;
  static bool is_under_way();
};

}  // namespace remat
