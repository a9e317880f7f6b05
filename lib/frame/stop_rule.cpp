#include "lib/frame/stop_rule.h"

#include "lib/base/counters.h"
#include "lib/base/planted_fault.h"
#include "lib/base/unwinding.h"
#include "lib/frame/mismatch.h"
#include "lib/seam/script.h"
#include "lib/state/user_state.h"
#include "lib/tensor/graph_walk.h"

namespace remat {

// Code that a waiting forward has not run yet must not run in a recompute.
StopRule::StopRule(const Region& region, const Slots& slots, const Progress& progress)
    : region_(region),
      slots_(slots),
      progress_(progress),
      early_stop_(region.options.early_stop || !progress.is_forward_over()) {}

void StopRule::took(const Slot& slot) {
  must_finish_operator_ = slot.finish_operator && !is_planted(Fault::LateWrite);
}

bool StopRule::ends_at(const SavedNow& now, bool was_complete, bool is_comparing) {
  if (progress_.is_complete() && !was_complete) last_operator_ = now.operator_number;
  // A stop that waited for its operator to finish is due when another operator saves.
  if (was_complete && (now.operator_number != last_operator_ || now.input != nullptr))
    must_finish_operator_ = false;
  if (!wants_stop(is_comparing) || !can_stop(now)) return false;
  note_stop();
  return true;
}

bool StopRule::wants_stop(bool is_comparing) const {
  if (progress_.has_too_many()) return true;
  if (!progress_.is_complete() || !may_end()) return false;
  if (must_finish_operator_ || is_comparing) return false;
  return !(progress_.view.ends_small && progress_.num_seen == progress_.num_slots());
}

bool StopRule::may_end() const {
  return early_stop_ &&
         (written_ == nullptr || is_planted(Fault::BufferStop) || written_->has_written_all());
}

// A script may have more left to run than its current operator.
bool StopRule::ends_soon() const {
  return progress_.view.last_is_small && progress_.num_seen == progress_.num_slots() &&
         may_stop_in_scripts_ && region_.body->stop_soon();
}

// Note [Where a stop may be thrown]
// A stop is not thrown in these places:
// * Through a noexcept function, or out of a destructor that saves during unwinding. Before and
//   after an inner backward, where the check is cheap, every noexcept function on the stack is
//   found: Note [Functions that nothing may pass].
// * On another thread, or inside a backward that the function runs: the signal would cross the
//   engine's worker loop.
// * While a C++ Function may be saving its own output, before or after the tensor at hand. The
//   Function clears its list of outputs on the normal path only, so the output would leak. Forward
//   notes whether it saves its output (`saves_own_output`), or it is seen here.
//
// The next save tries again.
bool StopRule::can_stop(const SavedNow& now) const {
  if (!is_on_own_ground()) return false;
  if (!may_stop_in_scripts_ && seam::is_in_script()) return false;
  if (is_planted(Fault::OwnOutput)) return true;
  if (is_made_by_function(now.judged())) return false;
  // Forward has not reached this operator yet, so nothing is known of it.
  if (now.position >= progress_.num_slots()) return progress_.is_forward_over();
  bool is_safe = true;
  slots_.with_slot(now.position, progress_.is_forward_over(),
                   [&](const Slot& slot) { is_safe = !slot.saves_own_output; });
  return is_safe;
}

void StopRule::note_stop() {
  if (!has_stopped_ && !progress_.has_too_many()) count(live_counters.early_stops);
  has_stopped_ = true;
}

void StopRule::stop() {
  region_.body->stop();
  report_returned("stop");
}

void StopRule::stop_outside_operator() {
  if (!is_on_own_ground() || !can_unwind_to(this)) return;
  note_stop();
  stop();
}

void StopRule::between_operators() {
  if (has_stopped_ || (progress_.is_complete() && may_end() && !progress_.has_too_many()))
    stop_outside_operator();
}

// A recompute is not stopped inside a backward. The code after that backward may save nothing, so
// that no save could stop it, and may write to an argument in place before forward does.
void StopRule::after_backward() {
  if (!progress_.is_forward_over() && progress_.is_complete()) stop_outside_operator();
}

bool StopRule::is_on_own_ground() const {
  return std::this_thread::get_id() == owner_ && seam::graph_task_id() == task_at_start_ &&
         region_.body->can_be_stopped() && std::uncaught_exceptions() == uncaught_at_start_;
}

}  // namespace remat
