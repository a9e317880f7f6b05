#pragma once
// A wait for another thread, which a binding of another language may have to prepare for.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

namespace remat {

/// While alive, this thread waits: what the binding's WaitCallbacks let go of is gone, and comes
/// back when this dies. Declare it before the lock that the wait gives up, and hold no other one.
class WaitForThread {
 public:
  WaitForThread();

 private:
  std::shared_ptr<void> let_go_;
};

/// Waits until `holds`, which a notification of `changed` announces; whether it did in time. `lock`
/// is held around, and given up meanwhile.
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

/// Which thread's turn it is where threads take turns, but hardly ever meet. A holder may need what
/// the binding's WaitCallbacks let go of, and may come again.
class Turns {
 public:
  /// While alive it is this thread's.
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

  /// Ends the turn of a thread that is not there, in a forked process.
  void end_turn_of_others() {
    if (holder_.load() != std::this_thread::get_id()) holder_.store({});
  }

 private:
  /// False if it is this thread's already.
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

/// Locks `mutex`, whose holder may need what the binding's WaitCallbacks let go of: a thread that
/// must wait for it waits without that. It gets it back when it has the mutex, which is no
/// standstill, as nobody waits for this mutex with it.
inline std::unique_lock<std::mutex> lock_in_turn(std::mutex& mutex) {
  std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
  if (!lock) {
    const WaitForThread waiting;
    lock.lock();
  }
  return lock;
}

}  // namespace remat
