#pragma once
// The slots of a region: one for each tensor that autograd saved in it, and what is known of them
// all.

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

/// What a recompute needs to know of the slots, taken at its start.
struct SlotView {
  c10::SmallVector<char, 48> is_needed;  ///< by position
  int64_t last_needed = -1, num_needed = 0;
  bool is_settled = false;     ///< the forward has returned
  bool ends_small = false;     ///< what a stop after the last slot would skip is next to nothing
  bool last_is_small = false;  ///< what the last slot's operator does after it is next to nothing
};

/// What a check noted of the tensor in a slot; the check is null where another thread had drawn
/// random numbers: then it is a hash.
struct NoteOfSlot {
  int64_t position;
  const TensorCheck* check;
  std::string text;
};

/// Filled by the thread that runs the forward, and by those of the engine that run a backward in
/// it; read by recomputes on any.
class Slots {
 public:
  /// Gives out room for the hook that refers to a slot; as long as these live.
  void* room_for_hook();
  /// A tensor was saved, an alias of `origin` if that is not null. `is_hashed`: its contents are
  /// noted also without a check. Returns its position.
  int64_t add(const Region& region, const at::Tensor& saved, const at::Tensor* origin,
              const RegionStart& start, const StorageSet& inputs, bool is_hashed);
  /// The next slot is of another operator than the last one, whatever the numbers of operators say.
  /// A recompute builds more nodes in this place than forward, or fewer: it has other recomputes in
  /// a backward, and pinned values instead of what made them. Notes the contents that are still to
  /// be noted: a recompute may end here.
  void end_operator(const Region& region);
  /// The function has returned: notes the contents that are still to be noted.
  void note_rest(const Region& region);
  /// Sums up for recorders what `settle` drops.
  recording::RegionSums sums(const StorageSet& results);

  struct Ending {
    const StorageSet& results;
    int64_t max_result_elements;  ///< of one result
    bool may_end_small;
    bool has_leaf_inputs;
    bool has_run_backward;  ///< the function ran one
  };
  using StorageVisitor = c10::function_ref<void(const c10::StorageImpl*)>;
  /// The forward is over. `is_kept`: whether a storage is kept, and may come back as another.
  /// `saw_statistics` is told the captured buffers that look like running statistics of a batch
  /// norm in training.
  void settle(const Ending& ending, c10::function_ref<bool(const c10::StorageImpl*)> is_kept,
              StorageVisitor saw_statistics);

  /// Nothing will read the slot again.
  void drop(int64_t position) noexcept;
  HeldInfo describe(int64_t position, const Region& region) const;
  /// Looks at every slot that is alive, or at `only_position` alone if it is not negative.
  SlotView view_for(int64_t only_position) const;
  /// Calls `fn` with a slot. Once the forward is over only `is_alive` changes, before that slots
  /// move.
  template <class Fn>
  void with_slot(int64_t position, bool is_settled, Fn&& fn) const {
    std::unique_lock<SpinLock> lock(mutex_, std::defer_lock);
    if (!is_settled) lock.lock();
    fn(slots_[at_position(position)]);
  }
  /// For an error about it.
  SlotIdentity identity_of(int64_t position) const {
    const std::lock_guard<SpinLock> lock(mutex_);
    return SlotIdentity(slots_[at_position(position)]);
  }
  /// How many there are. Once the forward is over, or on its thread.
  int64_t size() const { return static_cast<int64_t>(slots_.size()); }
  /// The notes of one slot; none if it is not compared beyond metadata. Call it in `with_slot`.
  c10::ArrayRef<NoteOfSlot> notes_of(int64_t position) const;
  /// Whether any leaf that a slot follows has changed.
  bool is_any_leaf_changed() const;
  bool has_slot_of(const c10::StorageImpl* storage) const;
  /// The tensor from outside, no leaf, that was saved and has its TensorImpl there; undefined if
  /// none has.
  at::Tensor captured_at(const void* address) const;
  void add_devices(DevicesMet& met) const;
  /// Whether a slot or an input may be a tensor from outside.
  bool may_meet_outside() const { return may_meet_outside_; }
  /// The tensors from outside that slots follow and that are alive.
  void visit_outside(c10::function_ref<void(at::Tensor)> visitor) const;
  /// Call it before the slots go, with the frame: counts what was dropped if nobody has.
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
    std::vector<NoteOfSlot> notes;  // by position
    std::vector<Pending> pending;   // noted when their operator is over
  };
  std::unique_ptr<Contents> contents_;  // null while none are compared
  Slab<Drop> hooks_;
  std::atomic<bool> has_contents_{false};  // not guarded; they stay
  bool is_operator_over_ = false;
  bool may_meet_outside_ = true;
  bool is_settled_ = false;
  bool ends_small_ = false, last_is_small_ = false;
  mutable SpinLock mutex_;
};

}  // namespace remat
