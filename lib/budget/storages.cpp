#include "lib/budget/storages.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/COW.h>

#include <algorithm>
#include <cstring>
#include <typeinfo>
#include <utility>

#include "lib/base/byte_hash.h"
#include "lib/observe/counted_memory.h"
#include "lib/seam/accelerator.h"
#include "lib/seam/dispatch_mode.h"

namespace remat::budget {

namespace {

// The deleter of a data pointer tells which allocator owns the memory.
c10::DeleterFnPtr deleter_of(c10::DeviceType type) {
  static const c10::DeleterFnPtr deleter = c10::GetAllocator(type)->allocate(1).get_deleter();
  return deleter;
}

}  // namespace

bool is_accelerator(c10::Device device) { return device.type() == present_accelerator(); }

bool is_memory_of_torch(const c10::StorageImpl& storage) {
  const c10::Device device = storage.device();
  if (device.is_cpu()) return is_cpu_memory_of_torch(storage);
  return is_accelerator(device) && storage.data_ptr().get_deleter() == deleter_of(device.type());
}

bool is_end_known(const c10::StorageImpl& storage) {
  return storage.device().is_cpu() ? is_end_told(storage) : is_memory_of_torch(storage);
}

bool is_plain(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return typeid(impl) == typeid(c10::TensorImpl) && !impl.is_python_dispatch() &&
         (tensor.is_cpu() || is_accelerator(tensor.device())) && tensor.layout() == at::kStrided &&
         !tensor.is_quantized() && impl.has_storage() &&
         !impl.key_set().has(c10::DispatchKey::ZeroTensor) && !tensor.is_inference() &&
         impl.storage().nbytes() > 0;
}

NewStorages new_storages(c10::ArrayRef<c10::IValue> results, const StoragesOf& given) {
  NewStorages all;
  visit_tensors_in(results, [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !is_plain(tensor) || given.contain(tensor)) return;
    const bool is_known = std::any_of(all.begin(), all.end(), [&](const c10::Storage& each) {
      return each.unsafeGetStorageImpl() == storage_of(tensor);
    });
    if (!is_known) all.push_back(tensor.storage());
  });
  return all;
}

const void* address_of_data(const c10::StorageImpl& storage) {
  const at::DataPtr& data = storage.data_ptr();
  return c10::impl::cow::is_cow_data_ptr(data) ? nullptr : data.get();
}

c10::Storage storage_of_data(at::DataPtr data, int64_t bytes) {
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(data),
                      c10::GetCPUAllocator(), /*resizable=*/true);
}

at::Tensor bytes_in(const c10::Storage& storage) {
  const auto options = at::TensorOptions(at::kByte).device(storage.device());
  const auto count = static_cast<int64_t>(storage.nbytes());
  return at::empty({0}, options).set_(storage, 0, {count}, {1});
}

c10::Storage copy_of(const c10::Storage& storage) {
  const std::size_t bytes = storage.nbytes();
  if (!storage.device().is_cpu()) {
    const seam::DispatchModeOff unseen;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return bytes_in(storage).clone().storage();
  }
  at::DataPtr data = c10::GetCPUAllocator()->allocate(bytes);
  if (bytes > 0) std::memcpy(data.get(), storage.data(), bytes);
  return storage_of_data(std::move(data), static_cast<int64_t>(bytes));
}

uint64_t hash_of(const c10::StorageImpl& storage) {
  const uint64_t hash = hash_of_bytes(static_cast<const char*>(storage.data()), storage.nbytes());
  return hash == 0 ? 1 : hash;
}

}  // namespace remat::budget
