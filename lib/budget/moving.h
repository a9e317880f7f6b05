#pragma once
// Copies of contents that are stored elsewhere: in a file, or on the CPU.
//
// Note [Moving]
// With `BudgetOptions::moving`, contents are copied away while the program computes, once the live
// bytes have passed three quarters of the budget. After each operator, the budget copies all
// sources that it alone holds, because they cannot be made again. It copies another value if
// copying out and back takes less time than making the value again, until a quarter of the budget
// is copied. Values that backward reads last are copied first.
//
// A content whose copy is complete can be dropped like any other. Its cost is the time to read it
// back.
//
// If an allocation does not fit and nothing more can be dropped, the thread waits for copies under
// way. On the CPU it also writes sources to the file, which needs no operator and no memory of
// LibTorch.
//
// A copy belongs to a value, and therefore to one version of a storage. The copy begins only while
// the budget alone holds the storage. It is given up if the content is read or ends before the copy
// is complete. So a copy cannot mix two versions. The first three copies are of any values, and are
// timed. After a failed copy (a full disk, for example) the guard begins no more copies and warns
// once.

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <string>

#include "hooks/disk/spool.h"
#include "hooks/host/background.h"
#include "hooks/host/save_on_cpu.h"
#include "remat/move.h"

namespace remat::budget {

/// The shortest time of copies in one direction. Threads: any.
class CopyTime {
 public:
  /// Returns the time [seconds] for `bytes`; infinite if no copy was timed.
  double of(int64_t bytes) const { return s_per_byte_ * static_cast<double>(bytes); }
  void note(double seconds, int64_t bytes);
  int64_t num_timed() const { return num_timed_; }

 private:
  std::atomic<double> s_per_byte_{std::numeric_limits<double>::infinity()};
  std::atomic<int64_t> num_timed_{0};
};

/// The place of the copies of one guard. Threads: any.
class Mover {
 public:
  /// Throws `c10::ValueError` for invalid options, and if no file can be made in the directory.
  Mover(const MoveOptions& options, c10::Device device);
  int64_t min_bytes() const { return min_bytes_; }
  /// Returns whether a copy has failed, after which no other begins.
  bool is_stopped() const { return is_stopped_; }
  /// Returns whether too few copies were timed so far.
  bool is_learning() const { return out_.num_timed() < 3; }
  void stop(const std::string& error);
  /// Warns of a failed copy, once.
  void warn_if_stopped();
  /// Returns the time of a copy there and back [seconds]; infinite if no copy was timed.
  double seconds(int64_t bytes) const { return out_.of(bytes) + seconds_back(bytes); }
  /// Returns the time of a copy back; before the first copy back, that of a copy there.
  double seconds_back(int64_t bytes) const {
    return (back_.num_timed() > 0 ? back_ : out_).of(bytes);
  }

 private:
  friend class Moved;
  const int64_t min_bytes_;
  const std::unique_ptr<Spool> spool_;  // null: copies wait on the CPU
  const SaveOnCpu cpu_;
  CopyTime out_, back_;
  std::atomic<bool> is_stopped_{false};
  std::mutex mutex_;  // of `error_`
  std::string error_;
};

/// The copy of one content.
class Moved {
 public:
  /// `content`: held until the copy has ended. The copy begins with `begin` or `wait`.
  Moved(std::shared_ptr<Mover> mover, c10::Storage content);
  /// Cancels the copy, or waits for its end. Call without locks.
  ~Moved();
  Moved& operator=(Moved&&) = delete;

  /// Begins the copy beside the program's work. On an accelerator the copy waits for the current
  /// stream. Call without locks.
  void begin() noexcept;
  /// Waits for the end. On the CPU the copy is made here if no other thread has begun it, without
  /// operators and tensor memory.
  void wait() noexcept;
  /// Returns whether the copy has ended, well or not. Does not wait.
  bool is_over() const;
  /// Returns whether `wait` can wait for the end. `in_allocator`: no operator may run.
  bool can_wait(bool in_allocator) const {
    return device_.is_cpu() || (is_begun_ && !(in_allocator && waits_by_operators_));
  }

  /// Returns whether the copy stands in for the content. Guarded by the graph's lock, like
  /// `settle`.
  bool is_complete() const { return is_complete_; }
  /// Releases the content after the end of the copy. Another owner must hold it.
  void settle();
  double seconds_back() const { return mover_->seconds_back(bytes_); }

  /// Returns a new storage with the content, on the current stream. One thread at a time. Throws
  /// errors of reading and of allocations.
  c10::Storage load();

 private:
  void write() noexcept;

  const std::shared_ptr<Mover> mover_;
  const int64_t bytes_;
  const c10::Device device_;
  c10::Storage original_;
  std::shared_ptr<HostContents> host_;  // on an accelerator, until the file has the bytes
  std::shared_ptr<SpoolRange> range_;
  std::shared_ptr<Background::Job> job_;  // writes the file; null without one
  std::atomic<bool> is_begun_{false}, has_failed_{false};
  bool waits_by_operators_ = false;  // set before `is_begun_`
  bool is_complete_ = false;
};

}  // namespace remat::budget
