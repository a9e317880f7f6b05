#pragma once
// Allocations of the CPU's counting allocator, as seen by a budget.

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>

namespace remat {

/// Callbacks of the counting allocator. Any thread calls them. They must not allocate tensor
/// memory.
struct AllocationCallbacks {
  /// Called before an allocation of `bytes`, with the `live` bytes. May free memory, or throw.
  void (*begins)(int64_t bytes, int64_t live);
  /// Called before data is freed. `storage`: the noted storage, which may be dead already. Returns
  /// true if the callback has taken the data over with `take_over`; then it is not freed.
  bool (*freed)(const void* storage, const void* data) noexcept;
};

/// Installs the counting allocator and sets its callbacks for the rest of the process.
void set_allocation_callbacks(const AllocationCallbacks& callbacks);
/// Returns a new owner of data that the counting allocator is about to free.
at::DataPtr take_over(const void* data);
/// Adds or removes one user of `begins`; it is called while there are users.
void want_announcements(bool more);

/// Notes a storage beside its data, for `freed`. No effect on data of other allocators. One thread
/// at a time for one storage.
void note_storage_beside(const c10::StorageImpl& storage);

/// Returns whether `freed` is called for the storage's data: the storage alone owns it.
bool is_end_told(const c10::StorageImpl& storage);

/// Returns whether LibTorch's CPU allocator owns the data, so that no foreign code writes to it.
bool is_cpu_memory_of_torch(const c10::StorageImpl& storage);

}  // namespace remat
