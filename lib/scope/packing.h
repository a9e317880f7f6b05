#pragma once
// Knows, on a thread, that a pack function of the user's runs inside a region.

#include <ATen/core/Tensor.h>

namespace remat {

/// While alive a pack function runs. It may read what it packs, and what it made of that, past all
/// operators, and whoever unpacks may, too: a placeholder would not do. So the former counts as
/// read, and of the latter nothing is kept; its calls are counted as all others.
class Packing {
 public:
  explicit Packing(const at::Tensor& saved);
  ~Packing();
  Packing& operator=(Packing&&) = delete;
  static bool is_under_way();
};

}  // namespace remat
