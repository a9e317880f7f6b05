#pragma once
// Whose recompute has set something that is one for all threads: a provider's state, a generator.

#include <chrono>
#include <condition_variable>
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

/// One recompute after the other: two at a time would mix what they set. A recompute inside the
/// holder's, or on its thread, need not wait. Threads: any.
class Turns {
 public:
  /// False if it did not become free in time.
  bool take(const void* subject, const TurnTaker& taker, std::chrono::seconds longest_wait);
  /// The latest take of it.
  void give_back(const void* subject) noexcept;

 private:
  struct Holder {
    const TurnTaker* taker;
    std::thread::id thread;
  };
  std::mutex mutex_;
  std::condition_variable given_back_;
  std::unordered_map<const void*, std::vector<Holder>> holders_;
};

/// Those of the process.
Turns& turns();

}  // namespace remat
