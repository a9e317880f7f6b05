#pragma once
// Who wants to know of the copies that run beside the work: a recorder.

#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace remat {

class CopyWatch {
 public:
  /// Wait: no copy, but a stream of the program that stands still until one back is done.
  enum class Direction { Out, In, Wait };
  /// A copy of so many bytes is about to be queued on `stream`. Returns what `ends` gets; null:
  /// nothing.
  virtual std::shared_ptr<void> begins(const c10::Stream& stream, Direction direction,
                                       int64_t bytes) = 0;
  /// It is queued.
  virtual void ends(std::shared_ptr<void> begun) = 0;

  /// Null: nobody wants to know. What was set once lives until the process ends.
  static inline std::atomic<CopyWatch*> only{nullptr};

 protected:
  ~CopyWatch() = default;
};

/// While alive, a copy is queued, or a wait for one.
class WatchedCopy {
 public:
  WatchedCopy(const c10::Stream& stream, CopyWatch::Direction direction, int64_t bytes)
      : watch_(CopyWatch::only.load(std::memory_order_acquire)) {
    if (watch_ != nullptr) begun_ = watch_->begins(stream, direction, bytes);
  }
  ~WatchedCopy() {
    if (begun_ != nullptr) watch_->ends(std::move(begun_));
  }
  WatchedCopy& operator=(WatchedCopy&&) = delete;

 private:
  CopyWatch* const watch_;
  std::shared_ptr<void> begun_;
};

}  // namespace remat
