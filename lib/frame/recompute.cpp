#include "lib/frame/recompute.h"

#include <c10/util/ScopeExit.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lib/base/counters.h"
#include "lib/base/planted_fault.h"
#include "lib/base/set_while.h"
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

/// The start and the outcome of one attempt. A binding asks about it while the function runs.
struct Attempt {
  StartsFrom start = StartsFrom::Begin;
  bool is_again = false;                 ///< another attempt has read the inputs
  std::string changed{};                 ///< a buffer that it left otherwise than forward
  bool may_lie_at_start = false;         ///< it threw an error that another start might avoid
  const UserRestore* restore = nullptr;  ///< while the function runs
};
thread_local Attempt* running_attempt = nullptr;

/// Returns whether a recompute must leave buffers as forward did.
bool writes_buffers(Frame& frame) {
  const UserState* const state = frame.surroundings().user_state();
  return state != nullptr && state->is_compared();
}

/// Returns the operands of forward that have changed. See Note [Captures that nothing saves].
std::vector<const CapturedOperand*> changed_operands(Frame& frame, const SlotComparer& comparer) {
  std::vector<const CapturedOperand*> changed = frame.operands().changed();
  // Except an argument that was written to and whose contents were restored.
  std::erase_if(changed, [&](const CapturedOperand* each) { return comparer.given().has(*each); });
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
  SlotComparer& comparer = filler.comparer();
  const bool is_forward_over = filler.progress().is_forward_over();
  const bool is_compared = is_forward_over && writes_buffers(frame);
  comparer.set_vouched(user_state.written());
  if (is_compared) filler.stops().set_written(&user_state);
  if (user_state.has_failed())
    throw_recompute_failed(region, "a StateProvider did not become free within ten seconds",
                           "another thread recomputes a region with the same provider, and may "
                           "be waiting for this thread",
                           "create one provider for each thread");
  if (!surroundings.snapshot().has_default_dtype())
    throw_default_dtype(region, surroundings.snapshot().default_dtype);
  const StreamScope streams(values.beside == nullptr ? surroundings.streams() : &values.beside->own,
                            inputs);
  if (recorded != nullptr) recorded->function_begins();
  const auto recorded_end = c10::make_scope_exit([&] {
    if (recorded != nullptr) recorded->function_ends();
  });
  const DeviceRngSwap device_rng(surroundings.device_states([&] { return frame.devices_met(); }),
                                 scope->own_lock());
  if (device_rng.has_failed())
    throw_recompute_failed(region, "a device's generator did not become free within a minute",
                           "a recompute on another thread draws from the same generator, and may "
                           "be waiting for this thread",
                           "let one thread at a time run backward through regions that draw from "
                           "it, or set preserve_rng_state = false if other random numbers do no "
                           "harm");
  const DrawSwaps generators(scope->random());
  {
    const auto early_guards_end = c10::make_scope_exit([&] { scope->early_guards().put_back(); });
    // Begins here, so that a provider that runs a backward is not part of the recompute.
    const ActiveRecompute active(frame.values(), values, filler, scope->own_lock());
    const AmbientRestore ambient(surroundings.snapshot());
    const detail::StackSwap clean(scope);
    std::optional<seam::DispatchMode> dispatch_mode;
    if (frame.notes().sees_operators()) dispatch_mode.emplace();
    const OpLogScope logging(comparer.log());
    OutsideTensors outside;
    frame.visit_outside([&](at::Tensor known) { outside.add(std::move(known)); });
    scope->set_outside(&outside);
    scope->set_user_restore(&user_state);
    const auto is_given = [&](const at::Tensor& tensor) { return comparer.given().has(tensor); };
    std::optional<ChangedOperands> operands;
    if (region.options.capture_check == CaptureCheck::Raise && is_forward_over)
      operands.emplace(frame.start(), frame.operands(), changed_operands(frame, comparer),
                       user_state.written(), is_given);
    const seam::OnlyNodeWatch watch(operands ? &*operands : nullptr);
    if (operands) comparer.set_operands(&*operands);
    Scope user_scope;
    if (region.extras != nullptr && region.extras->contexts.recompute)
      user_scope = region.extras->contexts.recompute();
    attempt.restore = &user_state;
    const SetWhile running(running_attempt, &attempt);
    try {
      region.body->run_again(inputs);
    } catch (const StopSignal&) {
    } catch (...) {
      // Another language ends a recompute in its own way, and user code may convert that into an
      // exception of its own. The recompute is complete nevertheless.
      if (!filler.has_stopped()) throw;
    }
    user_scope.reset();
    scope->set_outside(nullptr);
    scope->set_user_restore(nullptr);
    comparer.differences().function_writes =
        !comparer.differences().captures.empty() && outside.has_written();
    outside.finish(region);
    if (KeptReplay* const replay = scope->replay()) replay->end();
    filler.finish();
  }
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
  SlotComparer& comparer = filler.comparer();
  filler.rethrow_refusal();
  if (notes.has_scripts() && !ran_same_plans(notes.scripts(), scripts))
    throw_changed_script(region);
  if (comparer.differences().has_other_numbers)
    throw_recompute_failed(
        region,
        "the recompute gave other values than forward, and another thread drew random "
        "numbers during forward",
        "a thread that the function starts draws from the default CPU generator, or an operator "
        "of the region gives other values each time it runs",
        "draw random numbers on the thread that calls the region, or set preserve_rng_state = "
        "false if other random numbers do no harm");
  const Progress& progress = filler.progress();
  const bool is_other_count = progress.has_too_many() || !progress.is_complete();
  if (!is_other_count && !comparer.differences().any()) return;
  if (const UserState* const state = frame.surroundings().user_state())
    for (const auto& flags : state->registered().flags)
      comparer.differences().has_other_members |= flags->has_other_members();
  Differences differences = filler.take_differences();
  if (is_other_count)
    throw_count_mismatch(region, progress.num_slots(), progress.num_seen, std::move(differences),
                         comparer.take_parting(), comparer.log());
  if (differences.any()) throw_differences(region, std::move(differences), comparer.log());
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
  const SetWhile preparing(is_preparing_recompute(), true);
  try {
    std::unique_ptr<RecordedRecompute> recorded;
    if (is_recording() && frame->recorded() != nullptr) {
      recorded = frame->recorded()->recompute_begins();
      values.recorded = frame->recorded()->recomputed_bytes();
    }
    const auto profiled = profiler::recompute_scope(region.info);
    const ObservedRecompute observed(frame->surroundings().user_state(), region.info);
    std::optional<SetWhile<bool>> reads(std::in_place, reads_again(), attempt.is_again);
    GivenInputs given = frame->inputs().unpack(region, frame->notes().has_run_backward());
    reads.reset();
    Filler filler(region, frame->slots(), frame->recorded(), values, only_position, given.tensors);
    auto scope = std::make_shared<RecomputeScope>(frame, filler);
    Inputs::Versions in_forward;
    if (!filler.progress().is_forward_over()) in_forward = frame->inputs().versions_in_forward();
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
                             "the recompute could not draw the random numbers that forward drew",
                             "the region uses the default CPU generator without LibTorch's "
                             "operators, or seeds it, while another thread draws from it, during "
                             "forward or now",
                             "let one thread at a time draw from the generator, or set "
                             "preserve_rng_state = false if other random numbers do no harm");
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
  return running_attempt != nullptr && running_attempt->start == StartsFrom::End;
}

void compare_member(const std::string& name, const at::Tensor& in_forward,
                    const at::Tensor& now) noexcept {
  if (running_attempt == nullptr) return;
  if (in_forward.defined() == now.defined() &&
      (!now.defined() || running_attempt->restore->is_as_left(in_forward, now)))
    return;
  running_attempt->changed = name;
}

}  // namespace remat
