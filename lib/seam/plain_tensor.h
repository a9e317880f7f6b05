#pragma once
// Tensors of LibTorch's own class, made without what an alias would throw away at once.
//
// Note [Aliases]
// A recompute makes one for each input and for each tensor that backward will ask for.
// `tensor_data()` takes 820 instructions: the constructor allocates a version counter, which the
// original's replaces, and LibTorch's table of functions and its modes are asked first. Of a tensor
// of the plain class, with no mode around, what it does is known, and takes half as many.

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>

namespace remat::seam {

/// Makes a tensor without elements on `storage`. It has no version counter: set one.
at::Tensor plain_tensor(c10::Storage storage, c10::DispatchKeySet keys, caffe2::TypeMeta dtype);

/// An alias as `tensor_data()` makes it: the same data and version counter, without history.
at::Tensor alias_without_history(const at::Tensor& tensor);

}  // namespace remat::seam
