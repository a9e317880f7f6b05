#pragma once
// The storages that a budget can drop and make again, and their bytes.

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

#include "lib/selective/call_record.h"

namespace remat::budget {

/// Whether the tensor is geometry over memory of the CPU, and nothing else.
bool is_plain(const at::Tensor& tensor);

/// The storages that a call's results bring, each once and none of those given: in the same order in a
/// rerun.
using NewStorages = c10::SmallVector<c10::Storage, 2>;
NewStorages new_storages(c10::ArrayRef<c10::IValue> results, const StoragesOf& given);

/// A storage of its own with the same bytes.
c10::Storage copy_of(const c10::Storage& storage);

/// A hash of a storage's bytes; never 0.
uint64_t hash_of(const c10::StorageImpl& storage);

}  // namespace remat::budget
