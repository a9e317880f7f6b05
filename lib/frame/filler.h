#pragma once
// Receives the tensors of one recompute: fills and compares the slots, and decides when to stop.

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "hooks/pack/slot.h"
#include "lib/base/waiting.h"
#include "lib/frame/captured_operands.h"
#include "lib/frame/keeper.h"
#include "lib/frame/mismatch.h"
#include "lib/frame/recomputed_values.h"
#include "lib/frame/slots.h"
#include "lib/scope/op_log.h"

namespace remat {

class UserRestore;
class UserState;

/// Receives the values of one recompute, one for each tensor that autograd saves. Threads: the
/// recompute's own, and the engine's threads that run a backward in it, several at once if that
/// backward uses several devices.
class Filler final : public SlotFiller {
 public:
  /// Wants every slot that is alive, or `only_position` alone if it is not negative. `inputs`: the
  /// arguments of this recompute.
  Filler(const Region& region, const Slots& slots, RecordedFrame* recorded,
         RecomputedValues& values, int64_t only_position, const std::vector<at::Tensor>& inputs);
  ~Filler() override;

  bool fill(const at::Tensor& saved, Kept& kept) override;
  [[noreturn]] void refuse_changed(const Kept& kept) const override;
  /// Called when the function is about to run a backward. No operator is under way here, so a
  /// recompute that is complete ends: that backward ran in the forward, and would accumulate its
  /// gradients again.
  void stop_before_backward();
  /// Called when a backward of the function has returned. If forward is still waiting inside a
  /// backward, a recompute that became complete in it ends: the code after it has not run in
  /// forward yet.
  void stop_after_backward();
  /// Ends a complete recompute in the same way if forward is waiting for a tensor that its function
  /// reads from its own graph.
  void stop_before_read() override { stop_after_backward(); }
  /// Called when the function has ended, by a return or a stop. Compares the contents that waited
  /// for this, and records the streams' work on which the tensors depend.
  void finish() {
    compare_pending(0, /*is_end=*/true);
    ready_.record();
  }

  /// Returns whether the region's forward had returned when the recompute began.
  bool is_forward_over() const { return view_.is_settled; }
  /// Returns whether the operand is an argument of this recompute, as it is given.
  bool gives(const CapturedOperand& operand) const;
  bool gives(const at::Tensor& tensor) const {
    return gives(known_storage_of(tensor), tensor.unsafeGetTensorImpl()->version_counter());
  }
  /// Makes the recompute run to its end, unless forward has not returned yet.
  void forbid_stop() { early_stop_ = !view_.is_settled; }
  /// Ignores tensors saved after the last slot.
  void ignore_rest() { rest_is_plain_ = true; }
  /// Forbids a stop before a script function has returned, since only then its plan is known.
  void forbid_stop_in_scripts() { may_stop_in_scripts_ = false; }
  /// Sets the storages that providers restored to forward's contents, or
  /// null. Note [Written by a provider].
  void set_vouched(const StorageSet* storages) { vouched_ = storages; }
  /// Sets the restore whose buffers are compared, or null. The function writes to them, and is not
  /// stopped before it has done so.
  void set_written(UserRestore* written) { written_ = written; }
  /// Sets the watch of changed operands while the function runs; null if none has changed.
  void set_operands(ChangedOperands* operands) { operands_ = operands; }
  /// Reports that the operator at work is not run again, since its result was kept.
  void result_was_kept() {
    if (operands_ != nullptr) operands_->forgive_operator();
  }
  /// Sets the replay of kept results, which checks every tensor that is saved.
  void set_replay(KeptReplay* replay) { replay_ = replay; }
  bool is_complete() const { return num_filled_ == view_.num_needed; }
  bool has_stopped() const { return has_stopped_; }
  /// Returns whether contents differ in a tensor saved after another thread had drawn in forward.
  bool has_other_numbers() const { return has_other_numbers_; }
  /// Returns whether forward is over and the recompute saved more tensors. With early stop that is
  /// not a difference: every needed tensor came before, and the recompute could have ended there.
  bool has_too_many() const {
    return view_.is_settled && num_seen_ > num_slots_ && !region_.options.early_stop &&
           !rest_is_plain_;
  }
  /// Returns whether the recompute may be ended here, as far as thread, backward and function are
  /// concerned.
  bool is_on_own_ground() const;
  /// Ends the recompute, in the way of the function's language.
  [[noreturn]] void stop() override;
  bool stop_at_region() override { return region_.body->stop_at_region(); }
  int64_t num_slots() const { return num_slots_; }
  int64_t num_seen() const { return num_seen_; }
  /// Makes the next tensor begin another operator (Slots::end_operator).
  void end_operator() {
    compare_pending(0, /*is_end=*/true);
    may_follow_ = false;
  }
  /// Notes the current exception, which counts even if user code catches it.
  void note_refusal() {
    if (refusal_ == nullptr) refusal_ = std::current_exception();
  }
  void rethrow_refusal() const {
    if (refusal_ != nullptr) std::rethrow_exception(refusal_);
  }
  /// Returns the differences. Call it after the function has unwound.
  Differences take_differences();
  /// Returns the first tensor that only one of the passes saved, if one of them saved more.
  std::optional<Difference> take_parting();
  bool has_differences() const { return differences_.any(); }
  bool has_changed_captures() const { return !differences_.captures.empty(); }
  /// Notes that the function itself has written to a captured tensor.
  void blame_function() { differences_.function_writes = true; }
  /// Notes whether the function's module has other members than in forward.
  void note_members(const UserState* state);
  /// Warns, once for each region name, if a part of the recompute's graph is still alive. Call it
  /// after the function has unwound and its arguments, which hold histories of writes to them, are
  /// gone.
  void warn_of_survivors(bool has_run_backward) const;
  OpLog* log() { return log_ ? &*log_ : nullptr; }

 private:
  /// `origin`: the input of which `saved` is an alias, or null.
  bool gives(const c10::StorageImpl* storage, const c10::VariableVersion& counter) const;
  void take(int64_t position, const at::Tensor& saved, const at::Tensor* origin,
            const at::Tensor& kept);
  bool is_vouched(const at::Tensor& tensor) const {
    return vouched_ != nullptr && vouched_->contains(known_storage_of(tensor));
  }
  bool is_changed_capture(const Slot& slot, const at::Tensor& judged) const;
  bool is_older_result(const Slot& slot, const at::Tensor& judged) const;
  void compare(int64_t position, const Slot& slot, const at::Tensor& saved,
               const at::Tensor* origin);
  void note_operands();
  Difference difference(int64_t position, const Slot& slot, const at::Tensor& judged,
                        std::string forward, std::string now) const;
  void compare_pending(uint64_t next_operator, bool is_end);
  void name_operators(const at::Tensor& saved);
  bool wants_stop() const;
  bool may_end() const;
  bool can_stop(const at::Tensor& saved, int64_t position) const;
  bool stops_soon() const;

  Turns saving_;
  const Region& region_;
  const Slots& slots_;
  RecordedFrame* const recorded_;
  RecomputedValues& values_;
  const SlotView view_;
  bool early_stop_;
  const int64_t num_slots_;
  const int64_t task_at_start_;
  const std::thread::id owner_ = std::this_thread::get_id();
  const RegionStart start_ = RegionStart::here();
  const int uncaught_at_start_ = std::uncaught_exceptions();
  ReadyStreams ready_;
  std::optional<OpLog> log_;
  KeptReplay* replay_ = nullptr;
  ChangedOperands* operands_ = nullptr;
  const StorageSet* vouched_ = nullptr;
  UserRestore* written_ = nullptr;
  struct GivenInput {
    const c10::StorageImpl* storage;  // only compared
    c10::VariableVersion counter;
  };
  c10::ArrayRef<GivenInput> inputs_with(const c10::StorageImpl* storage) const;
  c10::SmallVector<GivenInput, 2> inputs_;  // by storage
  Differences differences_;
  std::optional<Difference> first_beyond_;  // the first tensor saved after forward's last
  struct Pending {
    int64_t position;
    uint64_t operator_number;
    at::Tensor tensor;
    uint32_t version;
    TensorIdentity identity;
    c10::SmallVector<NoteOfSlot, 1> in_forward;
  };
  std::vector<Pending> pending_;  // compared when their operator has returned
  uint64_t last_operator_ = 0;    // of the operator that filled the last needed slot
  uint64_t operator_before_ = 0;  // of the tensor saved last
  bool may_follow_ = false;       // the next tensor, if that operator saves it
  bool follows_ = false;          // the tensor at hand is of the same operator as the one before
  bool must_finish_operator_ = false;
  int64_t num_seen_ = 0, num_filled_ = 0;
  int64_t num_new_ = 0, bytes_ = 0;  // for the counters, which are updated once
  std::exception_ptr refusal_;
  bool has_stopped_ = false;
  bool has_other_numbers_ = false;
  bool may_stop_in_scripts_ = true;
  bool rest_is_plain_ = false;
};

}  // namespace remat
