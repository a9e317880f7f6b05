#pragma once
// Storages that a budget can drop and make again.

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

#include "lib/selective/call_record.h"

namespace remat::budget {

/// Returns whether the device is one of the process's accelerator.
bool is_accelerator(c10::Device device);
/// Returns whether the tensor is a strided view of memory of the CPU or the accelerator, of
/// LibTorch's own tensor class.
bool is_plain(const at::Tensor& tensor);
/// Returns whether LibTorch's allocator owns the data, so that no foreign code writes to it.
bool is_memory_of_torch(const c10::StorageImpl& storage);
/// Returns whether the end of the data will be known: see Note [Ends on accelerators].
bool is_end_known(const c10::StorageImpl& storage);

using NewStorages = c10::SmallVector<c10::Storage, 2>;
/// Returns the storages of the results that no argument has. A rerun returns them in the same
/// order.
NewStorages new_storages(c10::ArrayRef<c10::IValue> results, const StoragesOf& given);

/// Returns the address of a storage's data, to be compared; null if it may move by itself.
const void* address_of_data(const c10::StorageImpl& storage);

/// Returns a storage with that data.
c10::Storage storage_of_data(at::DataPtr data, int64_t bytes);

/// Returns the storage's bytes as a tensor. Call with the budget's dispatch mode off.
at::Tensor bytes_in(const c10::Storage& storage);

/// Returns a copy of the storage.
c10::Storage copy_of(const c10::Storage& storage);

/// Returns a hash of the bytes of a storage on the CPU; never 0.
uint64_t hash_of(const c10::StorageImpl& storage);

}  // namespace remat::budget
