#include "lib/digest.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <functional>
#include <string_view>

namespace remat {

namespace {

uint64_t combine(uint64_t seed, uint64_t value) {
  return (seed ^ value) * 0x9e3779b97f4a7c15ULL + (seed >> 29) + 1;
}

uint64_t digest_of_elements(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.detach().resolve_conj().resolve_neg().to(at::kCPU).contiguous();
  const std::string_view bytes(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes());
  return std::hash<std::string_view>{}(bytes);
}

}  // namespace

uint64_t digest_of(const at::Tensor& tensor) {
  at::NoGradGuard no_grad;
  at::DisableRecordFunctionGuard unseen;
  if (!tensor.defined() || tensor.is_meta()) return 0;
  uint64_t digest = static_cast<uint64_t>(tensor.scalar_type());
  if (tensor.is_nested())
    return combine(digest, digest_of_elements(at::_nested_get_values(tensor)));
  for (const int64_t size : tensor.sizes()) digest = combine(digest, static_cast<uint64_t>(size));
  if (tensor.layout() == at::kSparse) {
    digest = combine(digest, digest_of_elements(tensor._indices()));
    return combine(digest, digest_of_elements(tensor._values()));
  }
  if (tensor.layout() != at::kStrided)
    return combine(digest, digest_of_elements(tensor.to_dense()));
  return combine(digest, digest_of_elements(tensor));
}

}  // namespace remat
