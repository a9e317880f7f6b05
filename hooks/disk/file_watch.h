#pragma once
// The interface through which a recorder observes reads, writes and waits for files.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <utility>

#include "hooks/host/background.h"

namespace remat {

class FileWatch {
 public:
  enum class Work : uint8_t { Write, Read, Wait };
  struct Ended {
    Work work;
    int64_t bytes = 0;
    std::chrono::steady_clock::time_point begin{};
    /// True if the work held up the program: it ran neither on the thread of `Background` nor as a
    /// part of other such work.
    bool held_up = false;
  };
  /// Called at the end of the work, on the thread that did it.
  virtual void ended(const Ended& work) noexcept = 0;

  /// The watch, or null. A watch lives until the process ends.
  static inline std::atomic<FileWatch*> only{nullptr};

 protected:
  ~FileWatch() = default;
};

/// Reports to the watch that this thread reads, writes or waits during its lifetime.
class WatchedFileWork {
 public:
  WatchedFileWork(FileWatch::Work work, int64_t bytes)
      : watch_(FileWatch::only.load(std::memory_order_acquire)) {
    if (watch_ == nullptr) return;
    const bool is_part = std::exchange(is_working_, true);
    work_ = {work, bytes, std::chrono::steady_clock::now(), !is_part && !Background::is_here()};
    was_working_ = is_part;
  }
  ~WatchedFileWork() {
    if (watch_ == nullptr) return;
    is_working_ = was_working_;
    watch_->ended(work_);
  }
  WatchedFileWork& operator=(WatchedFileWork&&) = delete;

 private:
  static inline thread_local bool is_working_ = false;
  FileWatch* const watch_;
  FileWatch::Ended work_{};
  bool was_working_ = false;
};

}  // namespace remat
