#pragma once
// What one guard has moved so far.

#include <atomic>
#include <chrono>
#include <cstdint>

namespace remat {

/// Shared by a guard's depot, its pieces and its counters.
struct MoveTotals {
  std::atomic<int64_t> num_moves{0}, bytes_moved{0}, num_loads{0}, num_loads_ahead{0},
      bytes_loaded{0}, spent_ns{0};
};

/// While alive, this thread moves something.
class TimeSpent {
 public:
  /// Adds to it; null: nobody wants to know.
  explicit TimeSpent(std::atomic<int64_t>* total_ns) : total_ns_(total_ns) {
    if (total_ns_ != nullptr) begin_ = std::chrono::steady_clock::now();
  }
  ~TimeSpent() {
    if (total_ns_ != nullptr)
      *total_ns_ += std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin_).count();
  }
  TimeSpent& operator=(TimeSpent&&) = delete;

 private:
  std::atomic<int64_t>* const total_ns_;
  std::chrono::steady_clock::time_point begin_{};
};

}  // namespace remat
