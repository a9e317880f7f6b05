#pragma once
// A plain strided tensor taken apart: what an alias of it is built of, without the object.

#include <ATen/core/Tensor.h>
#include <c10/core/impl/SizesAndStrides.h>

#include <cstdint>

namespace remat {

/// The parts of one tensor are its storage, its layout there and its version counter. They weigh
/// less than an alias, and share no history with the tensor.
class TensorParts {
 public:
  /// Whether storage, layout and keys say all of a tensor: not of sparse, nested, inference and
  /// named ones, nor of subclasses.
  static bool can_take(const at::Tensor& tensor);
  explicit TensorParts(const at::Tensor& tensor);

  /// Builds a new alias without history, as `tensor_data()` of the tensor would be.
  at::Tensor build() const;

 private:
  c10::Storage storage_;
  c10::VariableVersion counter_;
  c10::DispatchKeySet keys_;
  c10::impl::SizesAndStrides layout_;
  int64_t offset_;
  caffe2::TypeMeta dtype_;
  bool may_change_metadata_;
};

}  // namespace remat
