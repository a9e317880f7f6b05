#pragma once
// A place where threads wait for each other.

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace remat::testing {

/// Lets `num_threads` threads continue when all of them have come, or after `longest`.
class Meeting {
 public:
  explicit Meeting(int num_threads, std::chrono::milliseconds longest = std::chrono::seconds(20))
      : num_threads_(num_threads), longest_(longest) {}
  Meeting& operator=(Meeting&&) = delete;
  /// Returns true if all came in time. A thread that waited in vain no longer counts.
  bool wait() {
    std::unique_lock lock(mutex_);
    ++num_here_;
    changed_.notify_all();
    const bool have_met =
        changed_.wait_for(lock, longest_, [&] { return num_here_ >= num_threads_; });
    if (!have_met) --num_here_;
    return have_met;
  }

 private:
  const int num_threads_;
  const std::chrono::milliseconds longest_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_here_ = 0;
};

}  // namespace remat::testing
