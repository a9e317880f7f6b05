#pragma once
// Sees the collectives of c10d, which write to tensors past their schemas, and warns of those that
// a recompute runs again.

#include <c10/core/StorageImpl.h>

#include <atomic>

namespace remat {

/// Notes whether a collective, on any thread, wrote to a storage since the watch was made.
class CollectiveWatch {
 public:
  /// `storage`: must outlive the watch; null for none.
  explicit CollectiveWatch(const c10::StorageImpl* storage);
  ~CollectiveWatch();
  CollectiveWatch& operator=(CollectiveWatch&&) = delete;
  bool is_written() const { return is_written_.load(std::memory_order_acquire); }

 private:
  friend class CollectiveWatches;
  const c10::StorageImpl* const storage_;
  std::atomic<bool> is_written_{false};
};

/// Warns, once for each name of regions and in C++ alone, that a recompute runs a collective again.
void warn_of_collective(const char* op);

}  // namespace remat
