#pragma once
// Compares the tensors of one recompute with the slots that forward left for them.

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "lib/frame/captured_operands.h"
#include "lib/frame/keeper.h"
#include "lib/frame/mismatch.h"
#include "lib/frame/recomputed_values.h"
#include "lib/frame/stop_rule.h"
#include "lib/scope/op_log.h"

namespace remat {

/// The storages and version counters of a recompute's arguments.
class GivenCounters {
 public:
  explicit GivenCounters(const std::vector<at::Tensor>& inputs);
  bool has(const c10::StorageImpl* storage) const { return !with(storage).empty(); }
  bool has(const c10::StorageImpl* storage, const c10::VariableVersion& counter) const;
  /// Returns whether the tensor or operand is an argument, as it is given.
  bool has(const at::Tensor& tensor) const {
    return has(known_storage_of(tensor), tensor.unsafeGetTensorImpl()->version_counter());
  }
  bool has(const CapturedOperand& operand) const;

 private:
  struct Given {
    const c10::StorageImpl* storage;  // only compared
    c10::VariableVersion counter;
  };
  c10::ArrayRef<Given> with(const c10::StorageImpl* storage) const;
  c10::SmallVector<Given, 2> all_;  // by storage
};

/// Compares the tensors that autograd saves in one recompute, in the order of the saves, and
/// collects the differences. Threads: one at a time.
class SlotComparer {
 public:
  /// `inputs`: the arguments of the recompute.
  SlotComparer(const Region& region, const Slots& slots, const Progress& progress,
               const std::vector<at::Tensor>& inputs);

  /// Begins with a saved tensor, and sets its operator. Compares the contents of tensors whose
  /// operator has returned.
  void begin(SavedNow& now);
  /// Compares the tensor with its slot. Call it in Slots::with_slot().
  void compare(const Slot& slot, const SavedNow& now);
  /// Ends with a tensor that was compared. `is_made_inside`: whether forward's tensor in its slot
  /// was made inside the region.
  void end(const SavedNow& now, bool is_made_inside);
  /// Notes a tensor that has no slot.
  void note_beyond(const SavedNow& now);
  /// Returns whether contents wait for the end of their operator.
  bool is_comparing() const { return !pending_.empty(); }
  /// Makes the next tensor begin another operator (Slots::end_operator).
  void end_operator() {
    compare_pending(0, /*is_end=*/true);
    may_follow_ = false;
  }

  /// Sets the storages that providers restored to forward's contents, or
  /// null. Note [Written by a provider].
  void set_vouched(const StorageSet* storages) { vouched_ = storages; }
  bool is_vouched(const at::Tensor& tensor) const {
    return vouched_ != nullptr && vouched_->contains(known_storage_of(tensor));
  }
  /// Sets the watch of changed operands while the function runs; null if none has changed.
  void set_operands(ChangedOperands* operands) { operands_ = operands; }
  ChangedOperands* operands() const { return operands_; }
  /// Sets the replay of kept results, which knows the copies of kept values.
  void set_replay(KeptReplay* replay) { replay_ = replay; }
  const GivenCounters& given() const { return given_; }

  /// Returns the differences so far.
  Differences& differences() { return differences_; }
  /// Returns the differences. Call it after the function has unwound.
  Differences take_differences(RecomputedValues& values);
  /// Returns the first tensor that only one of the passes saved, if one of them saved more.
  std::optional<Difference> take_parting();
  OpLog* log() { return log_ ? &*log_ : nullptr; }

 private:
  bool is_changed_capture(const Slot& slot, const at::Tensor& judged) const;
  bool is_older_result(const Slot& slot, const at::Tensor& judged) const;
  Difference difference(const Slot& slot, const SavedNow& now, std::string forward_text,
                        std::string now_text) const;
  void note_capture(const Slot& slot, const SavedNow& now);
  void compare_metadata(const Slot& slot, const SavedNow& now);
  void note_operands();
  void name_operators(const at::Tensor& saved);
  void compare_pending(uint64_t next_operator, bool is_end);

  const Region& region_;
  const Slots& slots_;
  const Progress& progress_;
  const GivenCounters given_;
  const std::thread::id owner_ = std::this_thread::get_id();
  const RegionStart start_ = RegionStart::here();
  std::optional<OpLog> log_;
  KeptReplay* replay_ = nullptr;
  ChangedOperands* operands_ = nullptr;
  const StorageSet* vouched_ = nullptr;
  Differences differences_;
  std::optional<Difference> first_beyond_;  // the first tensor saved after forward's last
  struct Pending {
    int64_t position;
    uint64_t operator_number;
    at::Tensor tensor;
    uint32_t version;
    TensorIdentity identity;
    std::string in_forward;  // the note
  };
  std::vector<Pending> pending_;  // compared when their operator has returned
  uint64_t operator_before_ = 0;  // of the tensor saved last
  bool may_follow_ = false;       // the next tensor, if that operator saves it
  bool follows_ = false;          // the tensor at hand is of the same operator as the one before
};

}  // namespace remat
