#include "lib/frame/input_copies.h"

#include <ATen/ops/clone.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <typeinfo>
#include <utility>

#include "lib/seam/dispatch_mode.h"
#include "lib/seam/lazy_copy.h"
#include "lib/seam/storage.h"
#include "lib/tensor/capture.h"
#include "lib/tensor/content_hash.h"

namespace remat {

namespace {

/// Returns whether the tensor consists of sizes, strides and an offset into a storage only.
bool is_plain(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return storage_of(tensor) != nullptr && typeid(impl) == typeid(c10::TensorImpl) &&
         !tensor.is_meta() && !tensor._is_zerotensor() && !impl.has_symbolic_sizes_strides() &&
         !has_no_memory(tensor);
}

constexpr int64_t alignment = 64;  // [bytes] of allocations

}  // namespace

InputCopies::Range InputCopies::range_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  int64_t last = tensor.storage_offset();
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto each = static_cast<int64_t>(tensor.dtype().itemsize());
  return {tensor.storage_offset() * each / alignment * alignment, (last + 1) * each};
}

void InputCopies::expect(const at::Tensor& tensor) {
  if (!is_plain(tensor) || tensor.numel() == 0) return;
  const Range range = range_of(tensor);
  if (Expected* const each = expected_of(storage_of(tensor))) {
    each->range = {std::min(each->range.begin, range.begin), std::max(each->range.end, range.end)};
    return;
  }
  expected_.push_back({storage_of(tensor), range});
}

InputCopies::Expected* InputCopies::expected_of(const c10::StorageImpl* storage) {
  const int64_t place = expected_places_.find(
      storage, expected_.size(), [this](std::size_t i) { return expected_[i].storage; });
  return place < 0 ? nullptr : &expected_[static_cast<std::size_t>(place)];
}

const InputCopies::Copy& InputCopies::of(const at::Tensor& tensor) {
  c10::StorageImpl* const from = storage_of(tensor);
  const int64_t known =
      copy_places_.find(from, copies_.size(), [this](std::size_t i) { return copies_[i].from; });
  if (known >= 0) return copies_[static_cast<std::size_t>(known)];
  const auto num_bytes = static_cast<int64_t>(from->nbytes());
  Range range{0, num_bytes};
  if (const Expected* const each = expected_of(from);
      each != nullptr && 2 * (each->range.end - each->range.begin) < num_bytes)
    range = each->range;
  // The copy starts at the original's version, since a function may read it.
  const c10::VariableVersion counter(static_cast<uint32_t>(tensor._version()));
  const bool is_whole = range.begin == 0 && range.end == num_bytes;
  if (how_ != How::AtOnce && is_whole)
    if (auto lazy = seam::lazy_copy(*from))
      return copies_.emplace_back(Copy{from, c10::Storage(std::move(lazy)), 0, counter});
  const auto keys = tensor.key_set() -
                    c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  at::Tensor bytes = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()), keys,
                                                              caffe2::TypeMeta::Make<uint8_t>());
  bytes.unsafeGetTensorImpl()->set_sizes_contiguous(range.end - range.begin);
  bytes.unsafeGetTensorImpl()->set_storage_offset(range.begin);
  return copies_.emplace_back(Copy{from, bytes.clone().storage(), range.begin, counter});
}

at::Tensor InputCopies::copy_of(const at::Tensor& tensor) {
  if (how_ != How::AtOnce && tensor.is_inference()) return {};
  const at::NoGradGuard no_grad;
  const seam::DispatchModeOff unseen;
  const c10::InferenceMode normal(false);
  if (!is_plain(tensor) || tensor.is_inference()) return tensor.detach().clone();
  if (range_of(tensor).end > static_cast<int64_t>(tensor.storage().nbytes())) return {};
  const Copy& copy = of(tensor);
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  auto made = impl.shallow_copy_and_detach(copy.counter, /*allow_tensor_metadata_change=*/true);
  made->set_storage_keep_dtype(copy.storage);
  if (copy.begin != 0)
    made->set_storage_offset(
        tensor.numel() == 0 ? 0
                            : tensor.storage_offset() -
                                  copy.begin / static_cast<int64_t>(tensor.dtype().itemsize()));
  return at::Tensor(std::move(made));
}

}  // namespace remat
