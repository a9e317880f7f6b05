#pragma once
// The memory that the CPU's counting allocator gave out: what may lie beside it, and who is told.

#include <c10/core/StorageImpl.h>

#include <cstdint>

namespace remat {

/// What the counting allocator calls, from any thread; plain functions. Neither may allocate memory
/// for tensors.
struct AllocationCallbacks {
  /// [bytes] are about to be allocated, where `live` are alive. May free some. May throw instead.
  void (*begins)(int64_t bytes, int64_t live);
  /// Data is about to be freed beside which this storage was noted; only compared, it may be gone.
  void (*freed)(const void* storage, const void* data) noexcept;
};

/// Installs the counting allocator, and sets whom it calls. Valid for good.
void set_allocation_callbacks(const AllocationCallbacks& callbacks);
/// While any is wanted, allocations are announced.
void want_announcements(bool more);

/// Notes a storage beside its data, so that it is told of its end; nothing if the counting allocator
/// did not give the data out. One thread at a time for one storage.
void note_storage_beside(const c10::StorageImpl& storage);

/// Whether the end of the storage's data is told: the counting allocator gave it out, to it alone.
bool is_end_told(const c10::StorageImpl& storage);

/// Whether LibTorch's allocator for the CPU gave out the data: nobody outside writes to it.
bool is_cpu_memory_of_torch(const c10::StorageImpl& storage);

}  // namespace remat
