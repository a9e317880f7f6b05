#include "lib/selective/in_argument.h"

#include <ATen/ops/empty_strided.h>

#include <algorithm>

#include "lib/seam/plain_tensor.h"
#include "lib/selective/kept_tensor.h"
#include "lib/tensor/capture.h"

namespace remat {

namespace {

/// Returns the distance from the first to the last element of a tensor that has elements.
int64_t extent_of(const at::Tensor& tensor) {
  int64_t extent = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) extent += (tensor.size(i) - 1) * tensor.stride(i);
  return extent;
}

bool is_same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.storage_offset() == b.storage_offset();
}

bool covers(const at::Tensor& argument, const at::Tensor& tensor) {
  if (is_same_layout(argument, tensor)) return true;
  if (tensor.numel() == 0 || !argument.is_non_overlapping_and_dense()) return false;
  const int64_t offset = tensor.storage_offset() - argument.storage_offset();
  return offset >= 0 && offset + extent_of(tensor) < argument.numel();
}

}  // namespace

InArgument::Layout InArgument::layout_of(const at::Tensor& tensor) {
  return {{tensor.sizes().begin(), tensor.sizes().end()},
          {tensor.strides().begin(), tensor.strides().end()}};
}

std::optional<InArgument> InArgument::find(const at::Tensor& tensor,
                                           const std::vector<at::Tensor>& arguments) {
  if (!tensor.defined() || !KeptTensor::can_be_taken_apart(tensor)) return std::nullopt;
  const auto found =
      std::find_if(arguments.begin(), arguments.end(), [&](const at::Tensor& argument) {
        return argument.defined() && storage_of(argument) == storage_of(tensor) &&
               KeptTensor::can_be_taken_apart(argument) &&
               argument.scalar_type() == tensor.scalar_type() &&
               argument.is_conj() == tensor.is_conj() && argument.is_neg() == tensor.is_neg() &&
               covers(argument, tensor);
      });
  if (found == arguments.end()) return std::nullopt;
  InArgument place;
  place.argument_ = static_cast<uint32_t>(found - arguments.begin());
  place.dtype_ = found->scalar_type();
  place.whole_ = layout_of(*found);
  if (is_same_layout(*found, tensor)) return place;
  place.view_ = layout_of(tensor);
  place.offset_ = tensor.storage_offset() - found->storage_offset();
  return place;
}

// A hook around the region may return an argument with other strides than forward's had. The view
// then lies in a copy with forward's strides.
at::Tensor InArgument::of(const std::vector<at::Tensor>& arguments) const {
  if (argument_ >= arguments.size()) return {};
  const at::Tensor& now = arguments[argument_];
  if (!now.defined() || now.scalar_type() != dtype_ || now.layout() != c10::kStrided ||
      now.sizes() != c10::IntArrayRef(whole_.sizes))
    return {};
  at::Tensor alias = seam::alias_without_history(now);
  if (!view_) return alias;
  if (alias.strides() != c10::IntArrayRef(whole_.strides))
    alias = at::empty_strided(whole_.sizes, whole_.strides, now.options()).copy_(alias);
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(view_->sizes, view_->strides,
                                                     alias.storage_offset() + offset_);
  return alias;
}

}  // namespace remat
