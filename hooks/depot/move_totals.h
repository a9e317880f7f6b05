#pragma once
// The counts of tensors that one guard, or one item of a plan, has moved.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

namespace remat {

/// The interface through which a recorder observes the moves of named items.
class MoveWatch {
 public:
  /// The change since the last report, as one event.
  struct Change {
    int64_t moves = 0, bytes_moved = 0, loads = 0, loads_ahead = 0, bytes_loaded = 0, spent_ns = 0;
  };
  virtual void changes(const std::string& name, const Change& change) noexcept = 0;

  /// The watch, or null. A watch lives until the process ends.
  static inline std::atomic<MoveWatch*> only{nullptr};

 protected:
  ~MoveWatch() = default;
};

/// The counts, shared by a depot, its pieces and a guard's counters.
struct MoveTotals {
  const std::string name{};  ///< the name of a plan's item
  std::atomic<int64_t> num_moves{0}, bytes_moved{0}, num_loads{0}, num_loads_ahead{0},
      bytes_loaded{0}, spent_ns{0};

  void moved(int64_t bytes) {
    num_moves += 1;
    bytes_moved += bytes;
    tell({.moves = 1, .bytes_moved = bytes});
  }
  void loaded(int64_t bytes, bool was_ahead) {
    num_loads += 1;
    num_loads_ahead += was_ahead ? 1 : 0;
    bytes_loaded += bytes;
    tell({.loads = 1, .loads_ahead = was_ahead ? 1 : 0, .bytes_loaded = bytes});
  }
  void spent(int64_t ns) {
    spent_ns += ns;
    tell({.spent_ns = ns});
  }

 private:
  void tell(const MoveWatch::Change& change) const {
    if (name.empty()) return;
    if (auto* const watch = MoveWatch::only.load(std::memory_order_acquire))
      watch->changes(name, change);
  }
};

/// Adds its lifetime, in which this thread moves a tensor, to the time spent.
class TimeSpent {
 public:
  explicit TimeSpent(std::atomic<int64_t>& total_ns) : total_ns_(&total_ns) {}
  /// Adds to `totals`, unless it is null.
  explicit TimeSpent(MoveTotals* totals) : totals_(totals) {}
  ~TimeSpent() {
    if (total_ns_ == nullptr && totals_ == nullptr) return;
    const int64_t ns = std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin_).count();
    if (totals_ != nullptr)
      totals_->spent(ns);
    else
      *total_ns_ += ns;
  }
  TimeSpent& operator=(TimeSpent&&) = delete;

 private:
  std::atomic<int64_t>* const total_ns_ = nullptr;
  MoveTotals* const totals_ = nullptr;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace remat
