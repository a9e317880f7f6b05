#include "lib/tensor/tensor_metadata.h"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "lib/base/invariant.h"

namespace remat {

TensorMetadata::TensorMetadata(const at::Tensor& tensor, bool with_strides)
    : device_(tensor.device()),
      dtype_(tensor.scalar_type()),
      layout_(tensor.layout()),
      has_sizes_(!tensor.is_nested()),
      has_strides_(with_strides && has_sizes_ && layout_ == c10::kStrided) {
  if (!has_sizes_) return;
  const auto sizes = tensor.sizes();
  REMAT_INVARIANT(sizes.size() < 256, "a saved tensor has {} dimensions", sizes.size());
  dim_ = static_cast<uint8_t>(sizes.size());
  const std::size_t num_words = sizes.size() * (has_strides_ ? 2 : 1);
  if (num_words > num_inline) more_ = std::make_unique<int64_t[]>(num_words);
  std::copy(sizes.begin(), sizes.end(), words());
  if (has_strides_) std::copy_n(tensor.strides().begin(), dim_, words() + dim_);
}

bool TensorMetadata::describes(const at::Tensor& tensor) const {
  if (dtype_ != tensor.scalar_type() || device_ != tensor.device() || layout_ != tensor.layout() ||
      has_sizes_ == tensor.is_nested())
    return false;
  if (!has_sizes_) return true;
  const auto same = [](c10::IntArrayRef a, const int64_t* b, std::size_t n) {
    return a.size() == n && std::equal(a.begin(), a.end(), b);
  };
  return same(tensor.sizes(), words(), dim_) &&
         (!has_strides_ || same(tensor.strides(), words() + dim_, dim_));
}

int64_t TensorMetadata::numel() const {
  return has_sizes_ ? std::accumulate(words(), words() + dim_, int64_t{1}, std::multiplies<>()) : 0;
}

std::vector<int64_t> TensorMetadata::sizes() const {
  return has_sizes_ ? std::vector<int64_t>(words(), words() + dim_) : std::vector<int64_t>();
}

std::string TensorMetadata::text() const {
  std::string text = c10::toString(dtype_);
  if (has_sizes_)
    text += fmt::format("[{}]", fmt::join(words(), words() + dim_, ", "));
  else
    text += "[nested]";
  if (has_strides_)
    text += fmt::format(" strides [{}]", fmt::join(words() + dim_, words() + 2 * dim_, ", "));
  if (layout_ != c10::kStrided) {
    if (layout_ == c10::kSparse)
      text += " sparse";
    else
      text += fmt::format(" layout {}", static_cast<int>(layout_));
  }
  return text + " on " + device_.str();
}

}  // namespace remat
