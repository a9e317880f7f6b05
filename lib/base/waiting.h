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

}  // namespace remat
