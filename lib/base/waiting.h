#pragma once
// A wait for another thread, which a binding of another language may have to prepare for.

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

namespace remat {

/// While alive, this thread waits: what the binding's WaitCallbacks let go of is gone, and comes back when
/// this dies. Declare it before the lock that the wait gives up, and hold no other one.
class WaitForThread {
 public:
  WaitForThread();

 private:
  std::shared_ptr<void> let_go_;
};

/// Waits until `holds`, which a notification of `changed` announces; whether it did in time. `lock` is held
/// around, and given up meanwhile.
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

/// Locks `mutex`, whose holder may need what the binding's WaitCallbacks let go of: a thread that must wait for it waits
/// without that. It gets it back when it has the mutex, which is no standstill, as nobody waits for this mutex with it.
inline std::unique_lock<std::mutex> lock_in_turn(std::mutex& mutex) {
  std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
  if (!lock) {
    const WaitForThread waiting;
    lock.lock();
  }
  return lock;
}

}  // namespace remat
