#pragma once
// Makes tensors of LibTorch's own class without parts that an alias would discard at once.
//
// Note [Aliases]
// A recompute makes an alias for each input and for each tensor that backward will read.
// `tensor_data()` takes 820 instructions: the constructor allocates a version counter that is
// replaced by the original's, and LibTorch's table of functions and its modes are asked first. For
// a tensor of the plain class, with no mode around, the result is known, and takes half as many.

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>

namespace remat::seam {

/// Makes a tensor without elements on `storage`. It has no version counter: set one.
at::Tensor plain_tensor(c10::Storage storage, c10::DispatchKeySet keys, caffe2::TypeMeta dtype);

/// Returns an alias as `tensor_data()` does: the same data and version counter, without history.
at::Tensor alias_without_history(const at::Tensor& tensor);

}  // namespace remat::seam
