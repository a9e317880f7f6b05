#pragma once
// Storages without data, and other internals of tensors that lack a public name in some LibTorch.

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <string_view>

namespace remat::seam {

/// Makes a storage of `num_bytes` without data. An access to the data throws an error with `text`.
c10::Storage storage_without_data(std::size_t num_bytes, c10::Device device, std::string_view text);
/// Returns whether the tensor has such a storage.
bool has_storage_without_data(const at::Tensor& tensor);

/// Returns whether dimensions have names, as they may up to LibTorch 2.12.
bool has_names(const c10::TensorImpl& impl);

}  // namespace remat::seam
