#include "lib/tensor/content_hash.h"

#include <fmt/format.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <typeinfo>

#include "lib/base/byte_hash.h"
#include "lib/seam/dispatch_mode.h"

namespace remat {

namespace {

/// Returns whether there are elements in memory. A tensor of zeros that LibTorch's formulas make
/// has none, nor has one whose storage was freed (`resize_(0)`, as for sharded parameters).
bool has_elements(const at::Tensor& tensor) {
  if (tensor._is_zerotensor() || tensor.is_meta()) return false;
  return !tensor.has_storage() || tensor.numel() == 0 || tensor.storage().nbytes() > 0;
}

// A transposed weight is hashed in memory order, and its strides are hashed too: making it
// contiguous took longer than all the rest.
uint64_t hash_of_dense(const at::Tensor& dense) {
  uint64_t hash = hash_of_bytes(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes());
  if (!dense.is_contiguous())
    for (const int64_t stride : dense.strides())
      hash = combine(hash, static_cast<uint64_t>(stride));
  return hash;
}

uint64_t hash_of_elements(const at::Tensor& tensor) {
  if (!has_elements(tensor)) return tensor._is_zerotensor() ? 1 : 2;
  const at::Tensor near = tensor.detach().resolve_conj().resolve_neg().to(at::kCPU);
  return hash_of_dense(near.is_non_overlapping_and_dense() ? near : near.contiguous());
}

/// Returns whether the elements can be read in place. Then no operator runs, and none needs to be
/// hidden: guards and operators are most of the cost of hashing a small tensor.
bool lies_open(const c10::TensorImpl& impl) {
  constexpr c10::DispatchKeySet not_as_it_lies(
      {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor,
       c10::DispatchKey::Python, c10::DispatchKey::Functionalize});
  return typeid(impl) == typeid(c10::TensorImpl) && impl.layout() == c10::kStrided &&
         impl.device().is_cpu() && !impl.key_set().has_any(not_as_it_lies) && impl.has_storage() &&
         !impl.has_symbolic_sizes_strides() && impl.is_non_overlapping_and_dense() &&
         static_cast<std::size_t>(impl.storage_offset() + impl.numel()) * impl.itemsize() <=
             impl.storage().nbytes();
}

}  // namespace

bool has_no_memory(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (impl.key_set().has(c10::DispatchKey::Functionalize)) return true;
  if (!impl.is_python_dispatch()) return false;
  return !impl.has_storage() || impl.unsafe_storage().data() == nullptr;
}

uint64_t content_hash(const at::Tensor& tensor) {
  if (tensor.defined() && lies_open(*tensor.unsafeGetTensorImpl())) {
    uint64_t hash = static_cast<uint64_t>(tensor.scalar_type());
    for (const int64_t size : tensor.sizes()) hash = combine(hash, static_cast<uint64_t>(size));
    return combine(hash, hash_of_dense(tensor));
  }
  at::NoGradGuard no_grad;
  const at::DisableRecordFunctionGuard unrecorded;
  const seam::DispatchModeOff unseen;
  if (!tensor.defined() || tensor.is_meta()) return 0;
  uint64_t hash = static_cast<uint64_t>(tensor.scalar_type());
  if (tensor.is_nested()) {
    if (tensor.layout() == at::kJagged)
      return combine(hash, hash_of_elements(at::_nested_get_values(tensor)));
    for (const at::Tensor& each : tensor.detach().unbind())
      hash = combine(hash, content_hash(each));
    return hash;
  }
  if (has_no_memory(tensor)) return hash;
  for (const int64_t size : tensor.sizes()) hash = combine(hash, static_cast<uint64_t>(size));
  if (tensor.layout() == at::kSparse) {
    hash = combine(hash, hash_of_elements(tensor._indices()));
    return combine(hash, hash_of_elements(tensor._values()));
  }
  if (tensor.layout() != at::kStrided) return combine(hash, hash_of_elements(tensor.to_dense()));
  return combine(hash, hash_of_elements(tensor));
}

std::string text_of_contents(const at::Tensor& tensor) {
  return fmt::format("{:016x}", content_hash(tensor));
}

}  // namespace remat
