#pragma once
// The parts of a plain strided tensor from which an alias is built, without the object.

#include <ATen/core/Tensor.h>
#include <c10/core/impl/SizesAndStrides.h>

#include <cstdint>

namespace remat {

/// One tensor's storage, its layout there and its version counter. They need less memory than an
/// alias, and share no history with the tensor.
class TensorParts {
 public:
  /// Returns whether storage, layout and keys describe the tensor fully; false for sparse, nested,
  /// inference and named tensors, and for subclasses.
  static bool can_take(const at::Tensor& tensor);
  explicit TensorParts(const at::Tensor& tensor);

  /// Returns a new alias without history, like `tensor_data()` of the tensor.
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
