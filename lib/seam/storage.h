#pragma once
// Storages without data, and what else of a tensor's inside has no public name in every LibTorch.

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <string_view>

namespace remat::seam {

/// Makes a storage of so many bytes and no data. Who asks for the data gets an error with `text`.
c10::Storage storage_without_data(std::size_t num_bytes, c10::Device device, std::string_view text);
/// Whether the tensor has such a storage.
bool has_storage_without_data(const at::Tensor& tensor);

/// Whether dimensions have names, as they may up to LibTorch 2.12.
bool has_names(const c10::TensorImpl& impl);

}  // namespace remat::seam
