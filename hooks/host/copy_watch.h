#pragma once
// The interface through which a recorder observes copies that run beside other work.

#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace remat {

class CopyWatch {
 public:
  /// The kind of event. Wait: a stream of the program waits for a copy back.
  enum class Direction { Out, In, Wait };
  /// Called before a copy of `bytes` is queued on `stream`. Returns the argument of `ends`, or null
  /// if `ends` need not be called.
  virtual std::shared_ptr<void> begins(const c10::Stream& stream, Direction direction,
                                       int64_t bytes) = 0;
  /// Called when the copy is queued.
  virtual void ends(std::shared_ptr<void> begun) = 0;

  /// The watch, or null. A watch lives until the process ends.
  static inline std::atomic<CopyWatch*> only{nullptr};

 protected:
  ~CopyWatch() = default;
};

/// Reports to the watch that a copy, or a wait for one, is queued during its lifetime.
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
