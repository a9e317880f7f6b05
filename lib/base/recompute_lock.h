#pragma once
// Whose recompute has set something that is one for all threads: a provider's state, a generator.

#include <c10/util/ArrayRef.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace remat {

/// A recompute, to those that run in it: on its own thread, or on an engine's for a backward in it.
struct TurnTaker {
  const TurnTaker* around = nullptr;  ///< of the recompute that this one runs in, which outlives it
  bool is_inside(const TurnTaker* other) const {
    for (const TurnTaker* each = around; each != nullptr; each = each->around)
      if (each == other) return true;
    return false;
  }
};

/// One recompute after the other: two at a time would mix what they set. Need not wait: a recompute
/// inside the holder's, or on its thread; and any while the holder waits for a backward, which may
/// need the thread of the one that wants the turn. Whoever takes a turn so has put back what it set
/// before the holder goes on. Threads: any.
class Turns {
 public:
  /// False if nobody gave it back for so long.
  bool take(const void* subject, const TurnTaker& taker, std::chrono::seconds longest_wait);
  /// The latest take of it.
  void give_back(const void* subject) noexcept;

  using Takers = c10::ArrayRef<const TurnTaker*>;
  /// They run on this thread, which is about to wait for a backward.
  void suspend(Takers takers) noexcept;
  /// It is over. Waits for those who took a turn meanwhile.
  void resume(Takers takers) noexcept;

 private:
  struct Holder {
    const TurnTaker* taker;
    std::thread::id thread;
    int num_waits;  ///< backwards that it waits for, one in the other
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t num_given_back_ = 0;
  std::unordered_map<const void*, std::vector<Holder>> holders_;
};

/// Those of the process.
Turns& turns();

}  // namespace remat
