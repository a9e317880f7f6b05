#include "lib/kept_tensor.h"

#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>

#include <cstring>
#include <string_view>
#include <utility>

#include "lib/capture.h"
#include "lib/counters.h"
#include "lib/inputs.h"
#include "lib/match.h"

namespace remat {

namespace {

constexpr const char* shell_text =
    "remat: the data of a kept result were read that nothing seemed to need";

/// Whether the device's memory is spared by a copy on the CPU.
bool can_move(const at::Tensor& value) {
  return value.layout() == c10::kStrided && !value.is_nested() && value.has_storage() &&
         !value.is_meta() && !value.is_quantized();
}

/// The same shape with no data behind it, or an undefined tensor if that cannot be.
at::Tensor shell_of(const at::Tensor& value) {
  if (!value.has_storage() || value.layout() != c10::kStrided || value.is_nested() ||
      value.is_quantized() || value.unsafeGetTensorImpl()->has_symbolic_sizes_strides())
    return {};
  c10::Storage storage(c10::Storage::use_byte_size_t(), value.storage().nbytes(),
                       at::DataPtr(nullptr, value.device()), /*allocator=*/nullptr,
                       /*resizable=*/false);
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(shell_text);
  at::Tensor shell = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), value.unsafeGetTensorImpl()->key_set(), value.dtype());
  shell.unsafeGetTensorImpl()->set_sizes_and_strides(value.sizes(), value.strides(),
                                                     value.storage_offset());
  return shell;
}

}  // namespace

KeptTensor::KeptTensor(const at::Tensor& value, const detail::Scope& region,
                       detail::HooksAround hooks, KeptWhere where)
    : storage_(storage_of(value)), is_defined_(value.defined()) {
  if (!is_defined_) return;
  at::Tensor kept = value.tensor_data();
  device_ = value.device();
  num_bytes_ = value.has_storage() ? static_cast<int64_t>(value.nbytes()) : 0;
  if (where != KeptWhere::InPlace && !value.is_cpu()) {
    if (can_move(value)) {
      try {
        kept = kept.to(c10::kCPU);
        is_copy_ = true;
      } catch (const c10::OutOfMemoryError&) {
        if (where == KeptWhere::OnCpu) throw;
      }
    } else if (where == KeptWhere::OnCpu) {
      throw_unsupported("a policy answered MustCpuOffload for a result that cannot be moved",
                        "sparse, nested, quantized and meta tensors stay where they are",
                        "answer PreferCpuOffload, which keeps such a result where it is");
    }
    could_not_move_ = !is_copy_;
    count(is_copy_ ? live_counters.offloads : live_counters.offload_fallbacks);
  }
  if (!is_copy_ && !kept.is_inference()) {
    counter_ = kept.unsafeGetTensorImpl()->version_counter();
    version_ = static_cast<uint32_t>(kept._version());
  }
  if (kept.is_inference()) {
    inference_ = std::move(kept);
    return;
  }
  const detail::SaveAround around(region, hooks);
  const SavingInput saving(value);
  saved_ = torch::autograd::SavedVariable(kept, /*is_output=*/false);
  if (is_copy_ || saved_.has_hooks()) spare_shell_ = shell_of(value);
}

bool KeptTensor::is_changed() const {
  return is_defined_ && !is_copy_ && !is_shell() && counter_.enabled() &&
         counter_.current_version() != version_;
}

bool KeptTensor::shares_version_with(const at::Tensor& tensor) const {
  // A counter is nothing but a pointer, which it does not show.
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  const c10::VariableVersion& other = tensor.unsafeGetTensorImpl()->version_counter();
  return counter_.enabled() && std::memcmp(&counter_, &other, sizeof(void*)) == 0;
}

at::Tensor KeptTensor::restore() const {
  if (!is_defined_) return {};
  if (is_shell()) return shell_.tensor_data();
  const at::Tensor value = inference_.defined() ? inference_ : saved_.unpack();
  return is_copy_ && !value.device().is_cpu() ? value
         : is_copy_                           ? value.to(device_)
                                              : value.tensor_data();
}

void KeptTensor::settle(bool will_be_read) {
  const bool is_elsewhere = is_copy_ || is_behind_hooks();
  const at::Tensor spare = std::move(spare_shell_);
  if (!is_defined_ || is_shell() || will_be_read || inference_.defined()) return;
  shell_ = is_elsewhere ? spare : shell_of(saved_.unpack());
  if (!shell_.defined()) return;
  saved_ = {};
  counter_ = c10::VariableVersion(c10::VariableVersion::DISABLED);
}

bool KeptTensor::is_shell(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return false;
  // A shell has bytes and no data, which no other storage has outside of tracing.
  const c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  auto& impl = const_cast<c10::StorageImpl&>(storage);
  return impl._mutable_data_ptr_no_checks().get() == nullptr && impl.nbytes() > 0 &&
         impl.allocator() == nullptr && !impl.resizable() && !tensor.is_meta();
}

bool KeptTensor::is_shell_error(const std::exception& error) {
  return std::string_view(error.what()).find(shell_text) != std::string_view::npos;
}

}  // namespace remat
