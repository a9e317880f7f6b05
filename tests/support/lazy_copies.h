#pragma once
// Tells whether `InputMode::CopyOnWrite` defers its copies until a write.

#include <c10/core/StorageImpl.h>

namespace remat::testing {

// Storages that do not report writes (LibTorch before 2.13) are copied at once: the copies cost
// memory, and there is nothing to detect.
template <class Storage>
constexpr bool tells_of_writes = requires(Storage& storage) { storage.has_materializer(); };
constexpr bool has_lazy_copies = tells_of_writes<c10::StorageImpl>;

}  // namespace remat::testing
