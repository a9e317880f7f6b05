#pragma once
// Internals of tensors that lack a public name in some LibTorch.

#include <ATen/core/Tensor.h>

namespace remat::seam {

/// Returns whether dimensions have names, as they may up to LibTorch 2.12.
bool has_names(const c10::TensorImpl& impl);

}  // namespace remat::seam
