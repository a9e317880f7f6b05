#pragma once
// The slots of a region: one for each tensor that autograd saved in it, and their common state.

#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "hooks/pack/drop.h"
#include "hooks/pack/inspection.h"
#include "lib/base/slab.h"
#include "lib/base/spin_lock.h"
#include "lib/frame/naming.h"
#include "lib/frame/recorded_frame.h"
#include "lib/frame/region.h"
#include "lib/frame/slot.h"
#include "lib/rng/device_rng.h"

namespace remat {

/// The facts about the slots that a recompute needs, taken at its start.
struct SlotView {
  c10::SmallVector<char, 48> is_needed;  ///< by position
  int64_t last_needed = -1, num_needed = 0;
  bool is_settled = false;     ///< the forward has returned
  bool ends_small = false;     ///< a stop after the last slot would skip next to nothing
  bool last_is_small = false;  ///< the last slot's operator has next to nothing left to do
};

/// Written by the thread that runs the forward, and by the engine's threads that run a backward in
/// it. Read by recomputes on any thread.
class Slots {
 public:
  /// Returns memory for the hook that refers to a slot, which lives as long as this object.
  void* room_for_hook();
  /// Adds a slot for a saved tensor, an alias of `origin` if that is not null. `is_hashed`: its
  /// contents are noted even without a check. Returns its position.
  int64_t add(const Region& region, const at::Tensor& saved, const at::Tensor* origin,
              const RegionStart& start, const StorageSet& inputs, bool is_hashed);
  /// Makes the next slot begin another operator, whatever the operators' numbers are. In this place
  /// a recompute builds more or fewer nodes than forward, since it has other recomputes in a
  /// backward, and pinned values instead of their operators. Notes all pending contents, as a
  /// recompute may end here.
  void end_operator(const Region& region);
  /// Notes all pending contents. Call it when the function has returned.
  void note_rest(const Region& region);
  /// Returns, for recorders, the sums of the data that `settle` drops.
  recording::RegionSums sums(const StorageSet& results);

  struct Ending {
    const StorageSet& results;
    int64_t max_result_elements;  ///< of the largest result
    bool may_end_small;
    bool has_leaf_inputs;
    bool has_run_backward;  ///< the function ran one
  };
  using StorageVisitor = c10::function_ref<void(const c10::StorageImpl*)>;
  /// Decides the slots' final provenance when the forward is over. `is_kept`: whether a storage is
  /// kept, and may be returned as another. `saw_statistics` receives the captured buffers that look
  /// like running statistics of a batch norm in training mode.
  void settle(const Ending& ending, c10::function_ref<bool(const c10::StorageImpl*)> is_kept,
              StorageVisitor saw_statistics);

  /// Marks a slot that will not be read again.
  void drop(int64_t position) noexcept;
  HeldInfo describe(int64_t position, const Region& region) const;
  /// Returns a view of every slot that is alive, or of `only_position` alone if it is not negative.
  SlotView view_for(int64_t only_position) const;
  /// Calls `fn` with a slot. After the forward only `is_alive` changes; before that slots may move.
  template <class Fn>
  void with_slot(int64_t position, bool is_settled, Fn&& fn) const {
    std::unique_lock<SpinLock> lock(mutex_, std::defer_lock);
    if (!is_settled) lock.lock();
    fn(slots_[at_position(position)]);
  }
  /// Returns the identity of a slot, for an error about it.
  SlotIdentity identity_of(int64_t position) const {
    const std::lock_guard<SpinLock> lock(mutex_);
    return SlotIdentity(slots_[at_position(position)]);
  }
  /// Returns the number of slots. Call it when the forward is over, or on its thread.
  int64_t size() const { return static_cast<int64_t>(slots_.size()); }
  /// Returns the note of one slot: that of the region's check or, without one, a hash, since
  /// another thread had drawn random numbers. Null if it is not compared beyond metadata. Call it
  /// in `with_slot`.
  const std::string* note_of(int64_t position) const;
  /// Returns whether any leaf that a slot follows has changed.
  bool is_any_leaf_changed() const;
  bool has_slot_of(const c10::StorageImpl* storage) const;
  /// Returns the saved non-leaf tensor from outside whose TensorImpl is at `address`, or an
  /// undefined tensor.
  at::Tensor captured_at(const void* address) const;
  void add_devices(DevicesMet& met) const;
  /// Returns whether a slot or an input may be a tensor from outside.
  bool may_meet_outside() const { return may_meet_outside_; }
  /// Visits the tensors from outside that slots follow and that are alive.
  void visit_outside(c10::function_ref<void(at::Tensor)> visitor) const;
  /// Releases the slots at the frame's end. Counts the dropped tensors if settle() has not done so.
  void clear();

 private:
  int64_t push(Slot&& slot, const Region& region);
  void add_pending(int64_t position, const at::Tensor& saved);
  void note_pending(const Region& region, uint64_t next_operator, bool is_end);
  void settle_provenance(const Ending& ending,
                         c10::function_ref<bool(const c10::StorageImpl*)> is_kept);
  void settle_operators(StorageVisitor saw_statistics);

  // Guarded by the mutex, which is never held while user code runs.
  std::vector<Slot> slots_;
  struct Pending {
    int64_t position;
    at::Tensor tensor;
    uint32_t version;
  };
  struct Contents {
    std::vector<std::pair<int64_t, std::string>> notes;  // by position
    std::vector<Pending> pending;                        // noted when their operator is over
  };
  std::unique_ptr<Contents> contents_;  // null while no contents are compared
  Slab<Drop> hooks_;
  std::atomic<bool> has_contents_{false};  // not guarded; contents are never removed
  bool is_operator_over_ = false;
  bool may_meet_outside_ = true;
  bool is_settled_ = false;
  bool ends_small_ = false, last_is_small_ = false;
  mutable SpinLock mutex_;
};

}  // namespace remat
