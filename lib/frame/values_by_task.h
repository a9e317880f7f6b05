#pragma once
// The recomputed values of a region, by the backward that they are for: who computes, who waits,
// who takes.

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <mutex>

#include "lib/base/spin_lock.h"
#include "lib/frame/recomputed_values.h"
#include "lib/frame/region.h"
#include "lib/frame/slots.h"
#include "lib/frame/task.h"

namespace remat {

/// While alive, a recompute that begins anew reads its inputs on this thread: no second read in the
/// sense of strict_unpack.
class ReadsAgain {
 public:
  explicit ReadsAgain(bool is_again);
  ~ReadsAgain();
  ReadsAgain& operator=(ReadsAgain&&) = delete;
  static bool is_on();

 private:
  const bool before_;
};

/// A frame's recomputed values lie here until they are read (Rules 4, 7 and 9). Threads: any.
class ValuesByTask {
 public:
  /// What a thread that wants the value of a slot has to do.
  struct Turn {
    enum class What { Take, ReadAlone, Recompute } what = What::Recompute;
    Value value{};                             ///< Take: the value
    std::shared_ptr<RecomputedValues> values;  ///< Recompute: into these, then `fill` or `fail`
    bool is_cached = false;                    ///< Take: a cache keeps it, too
    c10::intrusive_ptr<SlotOwner> owner{};     ///< if it was waited for
  };
  /// Waits while another thread of the task recomputes, which may end with the last reference to
  /// the `owner` of this but what the turn has. Throws CheckpointError where the value may not be
  /// read again.
  Turn next(const Region& region, const Slots& slots, const Task& task, int64_t position,
            SlotOwner& owner);
  /// The values are recomputed, and kept under `key`. Takes the value of a slot.
  Value filled(const Region& region, const std::shared_ptr<RecomputedValues>& values,
               const TaskKey& key, const Task& task, int64_t position);
  /// The values could not be recomputed.
  void failed(const std::shared_ptr<RecomputedValues>& values) noexcept;
  /// The thread that recomputes them is about to wait for a backward: wakes the threads that wait
  /// for it.
  void owner_waits_for_backward(RecomputedValues& values);
  /// Nothing will read the slot again.
  void drop(int64_t position) noexcept;
  void end_task(const TaskKey& task) noexcept;

  using All = c10::SmallVector<std::shared_ptr<RecomputedValues>, 1>;
  All release() { return std::move(all_); }
  void clear() { all_.clear(); }

 private:
  Value take(const Region& region, RecomputedValues& values, int64_t position, const Task& task);
  bool is_fresh(const Region& region, const Slots& slots, const RecomputedValues& values) const;

  SpinLock mutex_;
  All all_;  // guarded by it; one for each task
};

}  // namespace remat
