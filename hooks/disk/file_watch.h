#pragma once
// Who wants to know what reading, writing and waiting for files takes: a recorder.

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
    /// The program did nothing else meanwhile: it was not the thread of `Background`, nor a part of
    /// other such work.
    bool held_up = false;
  };
  /// On the thread that did it.
  virtual void ended(const Ended& work) noexcept = 0;

  /// Null: nobody wants to know. What was set once lives until the process ends.
  static inline std::atomic<FileWatch*> only{nullptr};

 protected:
  ~FileWatch() = default;
};

/// While alive, this thread reads, writes or waits.
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
