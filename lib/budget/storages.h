#pragma once
// Storages that a budget can drop and make again.

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

#include "lib/selective/call_record.h"

namespace remat::budget {

/// Returns whether the tensor is a strided view of CPU memory, of LibTorch's own tensor class.
bool is_plain(const at::Tensor& tensor);

using NewStorages = c10::SmallVector<c10::Storage, 2>;
/// Returns the storages of the results that no argument has. A rerun returns them in the same
/// order.
NewStorages new_storages(c10::ArrayRef<c10::IValue> results, const StoragesOf& given);

/// Returns the address of a storage's data, to be compared; null if it may move by itself.
const void* address_of_data(const c10::StorageImpl& storage);

/// Returns a storage with that data.
c10::Storage storage_of_data(at::DataPtr data, int64_t bytes);

/// Returns a copy.
c10::Storage copy_of(const c10::Storage& storage);

/// Returns a hash of the bytes; never 0.
uint64_t hash_of(const c10::StorageImpl& storage);

}  // namespace remat::budget
