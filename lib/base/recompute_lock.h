#pragma once
// Serializes recomputes that set process-wide state: a provider's state, a generator.

#include <c10/util/ArrayRef.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace remat {

/// Represents a recompute to the recomputes inside it: on its own thread, or on an engine's thread
/// for a backward in it.
struct LockOwner {
  const LockOwner* around = nullptr;  ///< of the enclosing recompute, which outlives this one
  bool is_inside(const LockOwner* other) const {
    for (const LockOwner* each = around; each != nullptr; each = each->around)
      if (each == other) return true;
    return false;
  }
};

/// Lets one recompute at a time set a subject, since two at a time would mix their states. A
/// recompute inside the holder's, or on its thread, need not wait. While the holder waits for a
/// backward, no recompute waits, as that backward may need the waiting thread. A recompute that
/// acquires the lock in this way restores its settings before the holder continues. Threads: any.
class RecomputeLock {
 public:
  using Owners = c10::ArrayRef<const LockOwner*>;
  /// Called before this thread, which runs the owners, waits for a backward.
  void yield_to_backward(Owners owners) noexcept;
  /// Called after that backward. Waits for recomputes that acquired the lock meanwhile.
  void resume_after_backward(Owners owners) noexcept;

 private:
  friend class RecomputeHold;
  /// Waits until the subject is free. Returns false if it was not released for `longest_wait`.
  bool acquire(const void* subject, const LockOwner& owner, std::chrono::milliseconds longest_wait);
  /// Releases the subject for the owner that acquired it last.
  void release(const void* subject) noexcept;
  struct Holder {
    const LockOwner* owner;
    std::thread::id thread;
    int num_waits;  ///< nested backwards for which it waits
  };
  bool is_free(const void* subject, const LockOwner& owner) const;  // with the mutex held

  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t num_releases_ = 0;
  std::unordered_map<const void*, std::vector<Holder>> holders_;
};

/// Returns the lock that all recomputes of the process share.
RecomputeLock& recompute_lock();

/// Holds subjects of that lock for an owner while alive. Subjects are acquired in one global order,
/// so that two recomputes never wait for each other. After a subject that was not released in time,
/// no further ones are acquired.
class RecomputeHold {
 public:
  RecomputeHold(std::vector<const void*> subjects, const LockOwner& owner,
                std::chrono::milliseconds longest_wait)
      : subjects_(std::move(subjects)) {
    if (has_failed()) acquire(owner, longest_wait);
  }
  ~RecomputeHold() {
    if (num_held_ > 0) release();
  }
  RecomputeHold& operator=(RecomputeHold&&) = delete;
  bool has_failed() const { return num_held_ < subjects_.size(); }

 private:
  void acquire(const LockOwner& owner, std::chrono::milliseconds longest_wait);
  void release() noexcept;
  std::vector<const void*> subjects_;
  std::size_t num_held_ = 0;
};

}  // namespace remat
