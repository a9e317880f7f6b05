#pragma once
// Whose recompute has set something that is one for all threads: a provider's state, a generator.

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

/// An owner stands for a recompute, to those that run in it: on its own thread, or on an engine's
/// for a backward in it.
struct LockOwner {
  const LockOwner* around = nullptr;  ///< of the recompute that this one runs in, which outlives it
  bool is_inside(const LockOwner* other) const {
    for (const LockOwner* each = around; each != nullptr; each = each->around)
      if (each == other) return true;
    return false;
  }
};

/// The lock lets one recompute set a subject after the other: two at a time would mix what they
/// set. Need not wait: a recompute inside the holder's, or on its thread; and any while the holder
/// waits for a backward, which may need the thread of the one that wants it. Whoever acquires it so
/// has put back what it set before the holder goes on. Threads: any.
class RecomputeLock {
 public:
  using Owners = c10::ArrayRef<const LockOwner*>;
  /// The owners run on this thread, which is about to wait for a backward.
  void yield_to_backward(Owners owners) noexcept;
  /// The backward is over. Waits for those who acquired it meanwhile.
  void resume_after_backward(Owners owners) noexcept;

 private:
  friend class RecomputeHold;
  /// Waits until the subject is free; false if nobody gave it back for so long.
  bool acquire(const void* subject, const LockOwner& owner, std::chrono::milliseconds longest_wait);
  /// The owner that acquired the subject last gives it back.
  void release(const void* subject) noexcept;
  struct Holder {
    const LockOwner* owner;
    std::thread::id thread;
    int num_waits;  ///< backwards that it waits for, one in the other
  };
  bool is_free(const void* subject, const LockOwner& owner) const;  // holds the mutex

  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t num_releases_ = 0;
  std::unordered_map<const void*, std::vector<Holder>> holders_;
};

/// All recomputes of the process share this lock.
RecomputeLock& recompute_lock();

/// While alive an owner has subjects of that lock: it acquires them in one order for all, so that
/// two recomputes never wait for each other, and none after one that nobody gave back for so long.
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
