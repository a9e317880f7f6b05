#pragma once
// Faults and shortages of the stand-in of tests/device/stand_in.h, each for a time.

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "tests/device/stand_in.h"

namespace remat::testing {

/// After `after` copies one fails.
struct FailingCopy {
  explicit FailingCopy(int64_t after) { stand_in::fail_copy_after(after); }
  ~FailingCopy() { stand_in::fail_copy_after(-1); }
  FailingCopy& operator=(FailingCopy&&) = delete;
};

/// The device has this many bytes.
struct SmallDevice {
  explicit SmallDevice(int64_t bytes) { stand_in::set_total_bytes(bytes); }
  ~SmallDevice() { stand_in::set_total_bytes(stand_in::default_total_bytes); }
  SmallDevice& operator=(SmallDevice&&) = delete;
};

/// The host has no page-locked memory.
struct NoPinnedMemory {
  NoPinnedMemory() { stand_in::set_has_pinned_memory(false); }
  ~NoPinnedMemory() { stand_in::set_has_pinned_memory(true); }
  NoPinnedMemory& operator=(NoPinnedMemory&&) = delete;
};

/// The host has `beyond` bytes of page-locked memory beside those in use.
struct ShortPinnedMemory {
  explicit ShortPinnedMemory(int64_t beyond) {
    stand_in::set_total_pinned_bytes(stand_in::pinned_bytes() + beyond);
  }
  ~ShortPinnedMemory() { stand_in::set_total_pinned_bytes(stand_in::default_total_bytes); }
  ShortPinnedMemory& operator=(ShortPinnedMemory&&) = delete;
};

/// Holds up the copies that other threads make, until `let_go()`.
class HeldUpCopies {
 public:
  HeldUpCopies() {
    stand_in::set_before_copy([state = state_, here = std::this_thread::get_id()] {
      if (std::this_thread::get_id() == here) return;
      std::unique_lock<std::mutex> lock(state->mutex);
      state->num_waiting += 1;
      state->changed.notify_all();
      state->changed.wait(lock, [&] { return state->is_open; });
    });
  }
  ~HeldUpCopies() {
    let_go();
    stand_in::set_before_copy({});
  }
  HeldUpCopies& operator=(HeldUpCopies&&) = delete;
  void let_go() {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->is_open = true;
    state_->changed.notify_all();
  }
  /// Returns true if another thread comes to a copy.
  bool holds_one() {
    std::unique_lock<std::mutex> lock(state_->mutex);
    return state_->changed.wait_for(lock, std::chrono::seconds(60),
                                    [&] { return state_->num_waiting > 0; });
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_open = false;
    int num_waiting = 0;
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace remat::testing
