#pragma once
// Whether `InputMode::CopyOnWrite` waits with its copies for a write.

#include <c10/core/StorageImpl.h>

namespace remat::testing {

// Where storages do not tell of writes (LibTorch before 2.13) copies are made at once: they cost
// memory, and there is nothing to notice.
template <class Storage>
constexpr bool tells_of_writes = requires(Storage& storage) { storage.has_materializer(); };
constexpr bool has_lazy_copies = tells_of_writes<c10::StorageImpl>;

}  // namespace remat::testing
