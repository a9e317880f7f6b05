#pragma once
// Takes the tensors of one recompute: fills and compares the slots, and says when to stop.

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

/// The values of one recompute come in through it, one for each tensor that autograd saves: on its
/// thread, and on those of the engine that run a backward in it, which may be several at once if
/// that is on several devices.
class Filler final : public SlotFiller {
 public:
  /// The filler wants every slot that is alive, or `only_position` alone if it is not negative.
  /// `inputs`: the arguments of this recompute.
  Filler(const Region& region, const Slots& slots, RecordedFrame* recorded,
         RecomputedValues& values, int64_t only_position, const std::vector<at::Tensor>& inputs);
  ~Filler() override;

  bool fill(const at::Tensor& saved, Kept& kept) override;
  [[noreturn]] void refuse_changed(const Kept& kept) const override;
  /// The function is about to run a backward. No operator is under way here, so a recompute that
  /// has all it needs ends: that backward ran in the forward, and would accumulate its gradients
  /// again.
  void stop_before_backward();
  /// A backward of the function has returned. Where forward still waits in one, what comes after it
  /// is not to run yet: a recompute that got in it all it needs ends.
  void stop_after_backward();
  /// The same where forward waits for a tensor that its function reads off its own graph.
  void stop_before_read() override { stop_after_backward(); }
  /// The function has ended, by a return or a stop: takes what waited for it. All is queued on the
  /// devices that the tensors need.
  void finish() {
    compare_pending(0, /*is_end=*/true);
    ready_.record();
  }

  /// The region's forward had returned when the recompute began.
  bool is_forward_over() const { return view_.is_settled; }
  /// Whether the operand is an argument of this recompute, as it is given.
  bool gives(const CapturedOperand& operand) const;
  bool gives(const at::Tensor& tensor) const {
    return gives(known_storage_of(tensor), tensor.unsafeGetTensorImpl()->version_counter());
  }
  /// The recompute must run to its end, unless forward has not got there yet.
  void forbid_stop() { early_stop_ = !view_.is_settled; }
  /// What comes after the last slot is nobody's.
  void ignore_rest() { rest_is_plain_ = true; }
  /// Not before a script function has returned: then it is known what it ran.
  void forbid_stop_in_scripts() { may_stop_in_scripts_ = false; }
  /// Of these storages providers say that they are as forward saw
  /// them. Note [Written by a provider].
  void set_vouched(const StorageSet* storages) { vouched_ = storages; }
  /// The function writes to buffers that are compared: it is not stopped before it has done so.
  /// Null: it does not.
  void set_written(UserRestore* written) { written_ = written; }
  /// While the function runs, if what it computes with has changed; else null.
  void set_operands(ChangedOperands* operands) { operands_ = operands; }
  /// The operator at work is not run again: its result was kept.
  void result_was_kept() {
    if (operands_ != nullptr) operands_->forgive_operator();
  }
  /// What replays kept results looks at every tensor that is saved.
  void set_replay(KeptReplay* replay) { replay_ = replay; }
  bool is_complete() const { return num_filled_ == view_.num_needed; }
  bool has_stopped() const { return has_stopped_; }
  /// A tensor saved after another thread had drawn in forward came back with other contents.
  bool has_other_numbers() const { return has_other_numbers_; }
  /// More tensors came than forward saved, and forward is over. With early stop on that is no
  /// difference, since all that was needed came before, and might as well have been the end.
  bool has_too_many() const {
    return view_.is_settled && num_seen_ > num_slots_ && !region_.options.early_stop &&
           !rest_is_plain_;
  }
  /// Whether the recompute may be ended here, as far as thread, backward and function are
  /// concerned.
  bool is_on_own_ground() const;
  /// Ends it, in the way of the function's language.
  [[noreturn]] void stop() override;
  bool stop_at_region() override { return region_.body->stop_at_region(); }
  int64_t num_slots() const { return num_slots_; }
  int64_t num_seen() const { return num_seen_; }
  /// The next tensor is of another operator than the last one (Slots::end_operator).
  void end_operator() {
    compare_pending(0, /*is_end=*/true);
    may_follow_ = false;
  }
  /// The exception at hand counts also if user code catches it.
  void note_refusal() {
    if (refusal_ == nullptr) refusal_ = std::current_exception();
  }
  void rethrow_refusal() const {
    if (refusal_ != nullptr) std::rethrow_exception(refusal_);
  }
  /// After the function has unwound.
  Differences take_differences();
  /// The first tensor that only one of the passes saved, if one of them saved more.
  std::optional<Difference> take_parting();
  bool has_differences() const { return differences_.any(); }
  bool has_changed_captures() const { return !differences_.captures.empty(); }
  /// The function itself has written to what it captured.
  void blame_function() { differences_.function_writes = true; }
  /// Looks whether its module has other members now.
  void note_members(const UserState* state);
  /// The function has unwound, and its arguments are gone, which know what wrote to them: warns,
  /// once for each name, if a part of the graph that it made now is still there.
  void warn_of_survivors(bool has_run_backward) const;
  OpLog* log() { return log_ ? &*log_ : nullptr; }

 private:
  /// `origin`: the input of which `saved` is an alias; null for none.
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
    const c10::StorageImpl* storage;  // only to be compared
    c10::VariableVersion counter;
  };
  c10::ArrayRef<GivenInput> inputs_with(const c10::StorageImpl* storage) const;
  c10::SmallVector<GivenInput, 2> inputs_;  // by storage
  Differences differences_;
  std::optional<Difference> first_beyond_;  // what was saved after forward's last
  struct Pending {
    int64_t position;
    uint64_t operator_number;
    at::Tensor tensor;
    uint32_t version;
    TensorIdentity identity;
    c10::SmallVector<NoteOfSlot, 1> in_forward;
  };
  std::vector<Pending> pending_;  // contents to compare when their operator has returned
  uint64_t last_operator_ = 0;    // of the operator that filled the last needed slot
  uint64_t operator_before_ = 0;  // of the tensor saved last
  bool may_follow_ = false;       // the next one, if that operator saves it
  bool follows_ = false;          // the tensor at hand is of the same operator as the one before
  bool must_finish_operator_ = false;
  int64_t num_seen_ = 0, num_filled_ = 0;
  int64_t num_new_ = 0, bytes_ = 0;  // for the counters, which are told once
  std::exception_ptr refusal_;
  bool has_stopped_ = false;
  bool has_other_numbers_ = false;
  bool may_stop_in_scripts_ = true;
  bool rest_is_plain_ = false;
};

}  // namespace remat
