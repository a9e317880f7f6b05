#include "lib/frame/recompute.h"

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lib/base/counters.h"
#include "lib/base/planted_fault.h"
#include "lib/base/stack_room.h"
#include "lib/frame/active_recomputes.h"
#include "lib/frame/filler.h"
#include "lib/frame/mismatch.h"
#include "lib/frame/naming.h"
#include "lib/frame/recompute_scope.h"
#include "lib/frame/values_by_task.h"
#include "lib/scope/op_log.h"
#include "lib/scope/profiler.h"
#include "lib/seam/dispatch_mode.h"

namespace remat {

namespace {

/// The start and the outcome of one attempt.
struct Attempt {
  StartsFrom start = StartsFrom::Begin;
  bool is_again = false;          ///< another attempt has read the inputs
  std::string changed{};          ///< a buffer that it left otherwise than forward
  bool may_lie_at_start = false;  ///< it threw an error that another start might avoid
};

/// The attempt that a binding asks about while the function runs.
struct RunningAttempt {
  Attempt& attempt;
  const UserRestore& restore;
};
thread_local const RunningAttempt* running_attempt = nullptr;

class RunningNow {
 public:
  explicit RunningNow(const RunningAttempt& attempt)
      : around_(std::exchange(running_attempt, &attempt)) {}
  ~RunningNow() { running_attempt = around_; }
  RunningNow& operator=(RunningNow&&) = delete;

 private:
  const RunningAttempt* const around_;
};

/// Gives the filler the restored storages and buffers, for this object's lifetime.
class VouchedFor {
 public:
  VouchedFor(Filler& filler, UserRestore& restore, bool is_compared) : filler_(filler) {
    filler_.set_vouched(restore.written());
    filler_.set_written(is_compared ? &restore : nullptr);
  }
  ~VouchedFor() {
    filler_.set_vouched(nullptr);
    filler_.set_written(nullptr);
  }
  VouchedFor& operator=(VouchedFor&&) = delete;

 private:
  Filler& filler_;
};

/// Tells the record of a recompute, if there is one, when its function runs.
class RecordedRun {
 public:
  explicit RecordedRun(RecordedRecompute* recorded) : recorded_(recorded) {
    if (recorded_ != nullptr) recorded_->function_begins();
  }
  ~RecordedRun() {
    if (recorded_ != nullptr) recorded_->function_ends();
  }
  RecordedRun& operator=(RecordedRun&&) = delete;

 private:
  RecordedRecompute* const recorded_;
};

/// Returns whether a recompute must leave buffers as forward did.
bool writes_buffers(Frame& frame) {
  const UserState* const state = frame.surroundings().user_state();
  return state != nullptr && state->is_compared();
}

/// Returns the operands of forward that have changed. See Note [Captures that nothing saves].
std::vector<const CapturedOperand*> changed_operands(const Frame& frame, const Filler& filler) {
  std::vector<const CapturedOperand*> changed = frame.operands().changed();
  // Except an argument that was written to and whose contents were restored.
  std::erase_if(changed, [&](const CapturedOperand* each) { return filler.gives(*each); });
  return changed;
}

/// Runs the function with forward's surroundings. Returns normally after a stop, too; returns false
/// if another thread disturbed its random numbers.
bool run_function(Frame& frame, RecomputedValues& values, Filler& filler,
                  const std::shared_ptr<RecomputeScope>& scope, std::vector<at::Tensor>& inputs,
                  RecordedRecompute* recorded, Attempt& attempt) {
  const Region& region = frame.region();
  Surroundings& surroundings = frame.surroundings();
  std::vector<at::Tensor> captured;
  if (const UserState* const state = surroundings.user_state();
      state != nullptr && state->has_users_providers())
    frame.visit_outside([&](at::Tensor known) { captured.push_back(std::move(known)); });
  UserRestore user_state(surroundings.user_state(), scope->own_lock(), captured, attempt.start);
  const bool is_compared = filler.is_forward_over() && writes_buffers(frame);
  const VouchedFor vouched(filler, user_state, is_compared);
  if (user_state.has_failed())
    throw_recompute_failed(region, "a StateProvider did not become free within ten seconds",
                           "another thread recomputes a region that uses it too, and may be "
                           "waiting for this one",
                           "give each thread a provider of its own");
  if (!surroundings.snapshot().has_default_dtype())
    throw_default_dtype(region, surroundings.snapshot().default_dtype);
  const StreamScope streams(surroundings.streams(), inputs);
  const RecordedRun recorded_run(recorded);
  const DeviceRngSwap device_rng(surroundings.device_states([&] { return frame.devices_met(); }),
                                 scope->own_lock());
  if (device_rng.has_failed())
    throw_recompute_failed(region, "a device's generator did not become free within a minute",
                           "another thread's recompute draws from it too, and may be waiting for "
                           "this one",
                           "let one thread at a time run backward through regions that draw from "
                           "it, or set preserve_rng_state = false if other numbers do no harm");
  const DrawSwaps generators(scope->random());
  struct EarlyGuardsEnd {  // also if an exception is thrown
    ~EarlyGuardsEnd() { scope.put_back_early_guards(); }
    RecomputeScope& scope;
  } const early_guards_end{*scope};
  {
    // Begins here, so that a provider that runs a backward is not part of the recompute.
    const ActiveRecompute active(frame.values(), values, filler, scope->own_lock());
    const AmbientRestore ambient(surroundings.snapshot());
    const detail::StackSwap clean(scope);
    std::optional<seam::DispatchMode> dispatch_mode;
    if (frame.sees_operators()) dispatch_mode.emplace();
    const OpLogScope logging(filler.log());
    OutsideTensors outside;
    frame.visit_outside([&](at::Tensor known) { outside.add(std::move(known)); });
    scope->set_outside(&outside);
    scope->set_user_restore(&user_state);
    const auto is_given = [&](const at::Tensor& tensor) { return filler.gives(tensor); };
    std::optional<ChangedOperands> operands;
    if (region.options.capture_check == CaptureCheck::Raise && filler.is_forward_over())
      operands.emplace(frame.start(), frame.operands(), changed_operands(frame, filler),
                       user_state.written(), is_given);
    const seam::OnlyNodeWatch watch(operands ? &*operands : nullptr);
    filler.set_operands(operands ? &*operands : nullptr);
    Scope user_scope;
    if (region.extras != nullptr && region.extras->contexts.recompute)
      user_scope = region.extras->contexts.recompute();
    const RunningAttempt asked{attempt, user_state};
    const RunningNow running_now(asked);
    try {
      region.body->run_again(inputs);
    } catch (const StopSignal&) {
    } catch (...) {
      // Another language ends a recompute in its own way, and user code may convert that into an
      // exception of its own. The recompute is complete nevertheless.
      if (!filler.has_stopped()) throw;
    }
    user_scope.reset();
    filler.set_operands(nullptr);
    scope->set_outside(nullptr);
    scope->set_user_restore(nullptr);
    if (filler.has_changed_captures() && outside.has_written()) filler.blame_function();
    outside.finish(region);
    if (KeptReplay* const replay = scope->replay()) replay->end();
    filler.finish();
  }
  scope->put_back_early_guards();
  if (is_compared && attempt.changed.empty())
    if (const at::Tensor changed = user_state.changed_buffer(); changed.defined()) {
      attempt.changed = name_of(region, TensorIdentity::of(changed));
      if (attempt.changed.empty()) attempt.changed = "a buffer of its module";
    }
  user_state.put_back();
  return !generators.were_disturbed();
}

/// Throws the error for differences from forward, if any.
void compare(Frame& frame, Filler& filler, const std::vector<seam::ScriptPlan>& scripts) {
  const Region& region = frame.region();
  const ForwardNotes& notes = frame.notes();
  filler.rethrow_refusal();
  if (notes.has_scripts() && !ran_same_plans(notes.scripts(), scripts))
    throw_changed_script(region);
  if (filler.has_other_numbers())
    throw_recompute_failed(
        region, "the recompute gave other values than forward, in which another thread drew",
        "a thread that the function starts itself draws from the default CPU generator, or an "
        "operator of the region gives other values each time it runs",
        "draw on the thread that calls the region, or set preserve_rng_state = false if other "
        "numbers do no harm");
  if (filler.has_too_many() || !filler.is_complete() || filler.has_differences())
    filler.note_members(frame.surroundings().user_state());
  if (filler.has_too_many() || !filler.is_complete())
    throw_count_mismatch(region, filler.num_slots(), filler.num_seen(), filler.take_differences(),
                         filler.take_parting(), filler.log());
  if (!filler.has_differences()) return;
  if (Differences differences = filler.take_differences(); differences.any())
    throw_differences(region, std::move(differences), filler.log());
}

/// Runs the function with the replay of kept results. Returns false if the run must be repeated.
bool run_and_replay(Frame& frame, RecomputedValues& values, Filler& filler,
                    const std::shared_ptr<RecomputeScope>& scope, std::vector<at::Tensor>& inputs,
                    RecordedRecompute* recorded, Attempt& attempt) {
  scope->begin(inputs);
  KeptReplay* const replay = scope->replay();
  if (replay == nullptr)
    return run_function(frame, values, filler, scope, inputs, recorded, attempt);
  bool is_undisturbed = false;
  std::exception_ptr thrown;
  try {
    is_undisturbed = run_function(frame, values, filler, scope, inputs, recorded, attempt);
  } catch (...) {
    thrown = std::current_exception();
  }
  replay->finish(thrown);
  return is_undisturbed;
}

/// Makes one attempt. Returns false, with no values, if it was disturbed or left a buffer otherwise
/// than forward.
bool try_recompute(const c10::intrusive_ptr<Frame>& frame, RecomputedValues& values,
                   int64_t only_position, Attempt& attempt) {
  count(live_counters.recomputes);
  const Region& region = frame->region();
  // Operators of the user's hooks, observers and providers do not belong to a region that waits on
  // this thread. run_function() watches operators if the frame does.
  const seam::DispatchModeOff unseen;
  const PreparingRecompute preparing;
  try {
    std::unique_ptr<RecordedRecompute> recorded;
    if (is_recording() && frame->recorded() != nullptr) {
      recorded = frame->recorded()->recompute_begins();
      values.recorded = frame->recorded()->recomputed_bytes();
    }
    const auto profiled = profiler::recompute_scope(region.info);
    const ObservedRecompute observed(frame->surroundings().user_state(), region.info);
    std::optional<ReadsAgain> reads(std::in_place, attempt.is_again);
    GivenInputs given = frame->inputs().unpack(region, frame->notes().has_run_backward());
    reads.reset();
    Filler filler(region, frame->slots(), frame->recorded(), values, only_position, given.tensors);
    auto scope = std::make_shared<RecomputeScope>(frame, filler);
    Inputs::Versions in_forward;
    if (!filler.is_forward_over()) in_forward = frame->inputs().versions_in_forward();
    if (!run_and_replay(*frame, values, filler, scope, given.tensors, recorded.get(), attempt) ||
        !attempt.changed.empty()) {
      values.clear();
      return false;
    }
    attempt.may_lie_at_start = true;
    frame->inputs().check_unwritten(region, given);
    frame->inputs().check_not_ahead(region, in_forward);
    scope->scripts()->end();
    compare(*frame, filler, scope->scripts()->plans());
    if (is_planted(Fault::SwappedSlots) && values.has(0) && values.has(1) &&
        values.peek(0).tensor.sizes().equals(values.peek(1).tensor.sizes()))
      std::swap(values.values[0], values.values[1]);
    if (recorded != nullptr) recorded->ends(filler.has_stopped(), values.num_bytes());
    scope.reset();
    given.tensors.clear();
    filler.warn_of_survivors(frame->notes().has_run_backward());
    return true;
  } catch (const std::exception& e) {
    values.clear();
    // Errors of LibTorch's operators may come from the start: a table that is still empty, for
    // example. Exceptions of the user's own and failed allocations are not retried.
    if (dynamic_cast<const c10::Error*>(&e) != nullptr &&
        dynamic_cast<const c10::OutOfMemoryError*>(&e) == nullptr)
      attempt.may_lie_at_start = true;
    throw;
  } catch (...) {
    values.clear();
    // The engine's threads catch std::exception only; any other type would end the process.
    throw_recompute_failed(
        region,
        "the function threw something that is not a std::exception during the "
        "recompute",
        "the autograd engine carries exceptions derived from std::exception only",
        "derive the exception type from std::exception");
  }
}

/// Repeats an attempt until none disturbs it. Throws after the last one.
void recompute_from(const c10::intrusive_ptr<Frame>& frame, RecomputedValues& values,
                    int64_t only_position, Attempt& attempt) {
  constexpr int max_attempts = 5;
  for (int number = 1; !try_recompute(frame, values, only_position, attempt); ++number) {
    if (!attempt.changed.empty()) return;
    attempt.is_again = true;
    if (number == max_attempts)
      throw_recompute_failed(frame->region(),
                             "the recompute could not draw the numbers that forward drew",
                             "the region takes numbers from the default CPU generator past "
                             "LibTorch's operators, or seeds it, while another thread draws from "
                             "it too, in forward or now",
                             "let one thread at a time draw from it, or set preserve_rng_state = "
                             "false if other numbers do no harm");
  }
}

/// See Note [Where recomputes begin].
void recompute_written(const c10::intrusive_ptr<Frame>& frame, RecomputedValues& values,
                       int64_t only_position) {
  const UserState& state = *frame->surroundings().user_state();
  std::string changed;
  std::exception_ptr thrown;  // of the likelier start, whose failure is more helpful
  const auto starts = state.starts();
  for (const StartsFrom start : starts) {
    Attempt attempt{start, start != starts.front()};
    const bool is_first = changed.empty() && thrown == nullptr;
    try {
      recompute_from(frame, values, only_position, attempt);
      if (attempt.changed.empty()) return state.remember(start);
      if (is_first) changed = std::move(attempt.changed);
    } catch (...) {
      if (!attempt.may_lie_at_start) throw;
      if (is_first) thrown = std::current_exception();
    }
  }
  if (thrown != nullptr) std::rethrow_exception(thrown);
  throw_changed_buffer(frame->region(), changed);
}

}  // namespace

void recompute(const c10::intrusive_ptr<Frame>& frame, RecomputedValues& values,
               int64_t only_position) {
  if (!has_stack_room())
    throw_recompute_failed(frame->region(), "regions are nested too deep for this thread's stack",
                           "each level of nesting is recomputed inside the next",
                           "nest less deep, or run backward on a thread with a larger stack");
  if (writes_buffers(*frame)) return recompute_written(frame, values, only_position);
  Attempt attempt;
  recompute_from(frame, values, only_position, attempt);
  if (!attempt.changed.empty()) throw_changed_buffer(frame->region(), attempt.changed);
}

StandInMembers::~StandInMembers() = default;

bool recompute_starts_from_end() noexcept {
  return running_attempt != nullptr && running_attempt->attempt.start == StartsFrom::End;
}

void compare_member(const std::string& name, const at::Tensor& in_forward,
                    const at::Tensor& now) noexcept {
  if (running_attempt == nullptr) return;
  if (in_forward.defined() == now.defined() &&
      (!now.defined() || running_attempt->restore.is_as_left(in_forward, now)))
    return;
  running_attempt->attempt.changed = name;
}

}  // namespace remat
