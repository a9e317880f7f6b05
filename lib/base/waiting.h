#pragma once
// Waits for another thread, for which a binding of another language may have to prepare.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

namespace remat {

/// Marks that this thread waits. The binding's WaitCallbacks release their lock for the lifetime of
/// this object. Declare it before the lock that the wait releases, and hold no other one.
class WaitForThread {
 public:
  WaitForThread();

 private:
  std::shared_ptr<void> let_go_;
};

/// Waits until `holds` returns true, which a notification of `changed` announces. Returns whether
/// it did in time. `lock` is held before and after, and released meanwhile.
template <class Holds>
bool wait_until(const Holds& holds, std::unique_lock<std::mutex>& lock,
                std::condition_variable& changed, std::chrono::milliseconds longest_wait) {
  bool is_in_time = true;
  while (!holds() && is_in_time) {
    lock.unlock();
    {
      const WaitForThread waiting;
      std::unique_lock<std::mutex> changing(*lock.mutex());
      is_in_time = changed.wait_for(changing, longest_wait, holds);
    }
    lock.lock();
  }
  return is_in_time;
}

/// A re-entrant lock for sections that are rarely contended. Its holder may need the lock that the
/// binding's WaitCallbacks release.
class Turns {
 public:
  /// Holds the turn for this thread while alive.
  class Turn {
   public:
    explicit Turn(Turns& turns) : turns_(turns), is_first_(turns.begin()) {}
    ~Turn() {
      if (is_first_) turns_.holder_.store({}, std::memory_order_release);
    }
    Turn& operator=(Turn&&) = delete;

   private:
    Turns& turns_;
    const bool is_first_;
  };

  /// Ends the turn of a thread that does not exist in a forked process.
  void end_turn_of_others() {
    if (holder_.load() != std::this_thread::get_id()) holder_.store({});
  }

 private:
  /// Returns false if this thread has the turn already.
  bool begin() {
    const std::thread::id self = std::this_thread::get_id();
    if (holder_.load(std::memory_order_relaxed) == self) return false;
    std::thread::id nobody{};
    if (!holder_.compare_exchange_strong(nobody, self, std::memory_order_acquire)) wait(self);
    return true;
  }
  void wait(std::thread::id self);

  std::atomic<std::thread::id> holder_{};
};

/// Locks `mutex`, whose holder may need the lock that the binding's WaitCallbacks release: a thread
/// that must wait for `mutex` releases that lock meanwhile. It takes the lock back while holding
/// `mutex`. This cannot deadlock, since no thread waits for `mutex` while holding that lock.
inline std::unique_lock<std::mutex> lock_in_turn(std::mutex& mutex) {
  std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
  if (!lock) {
    const WaitForThread waiting;
    lock.lock();
  }
  return lock;
}

}  // namespace remat
