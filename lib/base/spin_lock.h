#pragma once
// A lock for a handful of instructions, never held while user code runs or memory is freed.

#include <atomic>
#include <thread>

namespace remat {

/// Locks and unlocks without a call: every saved tensor passes three such locks, and std::mutex was
/// a twentieth of its cost. A waiting thread yields, so that the holder can continue.
class SpinLock {
 public:
  void lock() noexcept {
    while (is_held_.exchange(true, std::memory_order_acquire)) wait();
  }
  void unlock() noexcept { is_held_.store(false, std::memory_order_release); }

 private:
  void wait() const noexcept {
    constexpr int num_looks = 64;
    for (int i = 0; i < num_looks; ++i)
      if (!is_held_.load(std::memory_order_relaxed)) return;
    std::this_thread::yield();
  }
  std::atomic<bool> is_held_{false};
};

}  // namespace remat
