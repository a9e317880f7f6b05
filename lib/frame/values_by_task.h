#pragma once
// The recomputed values of a region by backward: decides which thread recomputes, waits or takes a
// value.

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

/// Returns this thread's mark of a repeated recompute that reads its inputs, which is not a second
/// read for strict_unpack.
bool& reads_again();

/// Holds a frame's recomputed values until they are read (Rules 4, 7 and 9). Threads: any.
class ValuesByTask {
 public:
  /// The action of a thread that wants the value of a slot.
  struct Turn {
    enum class What { Take, ReadAlone, Recompute } what = What::Recompute;
    Value value{};  ///< Take: the value
    std::shared_ptr<RecomputedValues>
        values{};                           ///< Recompute: into these, then `filled` or `failed`
    bool is_cached = false;                 ///< Take: a cache keeps it, too
    bool is_first = false;                  ///< the task's first read of prepared values
    c10::intrusive_ptr<SlotOwner> owner{};  ///< if the thread waited
  };
  /// Waits while another thread of the task recomputes. That may release the last reference to
  /// `owner` except the turn's. Throws CheckpointError where the value must not be read again.
  Turn next(const Region& region, const Slots& slots, const Task& task, int64_t position,
            SlotOwner& owner);
  /// Ends a recompute, whose values are held under `key`. Returns the value of a slot; nothing for
  /// a negative position, if the values were prepared.
  Value filled(const Region& region, const std::shared_ptr<RecomputedValues>& values,
               const TaskKey& key, const Task& task, int64_t position);
  /// Returns values to be filled ahead of the reads of a task, whose first read they await then.
  /// They are held under `owner`. Null if other values are there already.
  std::shared_ptr<RecomputedValues> begin_ahead(const Task& task, const TaskKey& owner);
  /// Gives a task the values that it took over, since the cache around has no room.
  void leave_cache(const Task& task);
  /// Returns the bytes held under a key.
  int64_t num_bytes(const TaskKey& key);
  /// Discards values that could not be recomputed.
  void failed(const std::shared_ptr<RecomputedValues>& values) noexcept;
  /// Wakes the threads that wait for `values`, since the recomputing thread is about to wait for a
  /// backward.
  void owner_waits_for_backward(RecomputedValues& values);
  /// Releases the values of a slot that will not be read again.
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
