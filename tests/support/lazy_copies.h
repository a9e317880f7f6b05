#pragma once
// Regions that keep copies of their arguments (`InputMode::CopyOnWrite`), and whether a copy waits
// for a write.

#include <c10/core/StorageImpl.h>

#include "tests/support/support.h"

namespace remat::testing {

// Storages that do not report writes (LibTorch before 2.13) are copied at once: the copies cost
// memory, and there is nothing to detect.
template <class Storage>
constexpr bool tells_of_writes = requires(Storage& storage) { storage.has_materializer(); };
constexpr bool has_lazy_copies = tells_of_writes<c10::StorageImpl>;

/// Options of a region that keeps copies of its arguments.
inline const CheckpointOptions copies{.inputs = InputMode::CopyOnWrite};

}  // namespace remat::testing
