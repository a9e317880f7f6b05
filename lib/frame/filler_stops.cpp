// Filler: decides where a recompute may end.

#include "lib/frame/filler.h"

#include <functional>

#include "lib/base/counters.h"
#include "lib/base/planted_fault.h"
#include "lib/base/unwinding.h"
#include "lib/seam/engine.h"
#include "lib/seam/script.h"
#include "lib/state/user_state.h"
#include "lib/tensor/graph_walk.h"

namespace remat {

bool Filler::wants_stop() const {
  if (has_too_many()) return true;
  if (!is_complete() || !may_end()) return false;
  if (must_finish_operator_ || !pending_.empty()) return false;
  return !(view_.ends_small && num_seen_ == num_slots_);
}

bool Filler::may_end() const {
  return early_stop_ &&
         (written_ == nullptr || is_planted(Fault::BufferStop) || written_->has_written_all());
}

// A script may have more left to run than its current operator.
bool Filler::stops_soon() const {
  return view_.last_is_small && num_seen_ == num_slots_ && may_stop_in_scripts_ &&
         region_.body->stop_soon();
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
bool Filler::can_stop(const at::Tensor& saved, int64_t position) const {
  if (!is_on_own_ground()) return false;
  if (!may_stop_in_scripts_ && seam::is_in_script()) return false;
  if (is_planted(Fault::OwnOutput)) return true;
  if (is_made_by_function(saved)) return false;
  // Forward has not reached this operator yet, so nothing is known of it.
  if (position >= num_slots_ && !view_.is_settled) return false;
  bool is_safe = true;
  if (position < num_slots_)
    slots_.with_slot(position, view_.is_settled,
                     [&](const Slot& slot) { is_safe = !slot.saves_own_output; });
  return is_safe;
}

void Filler::stop() {
  region_.body->stop();
  report_returned("stop");
}

void Filler::stop_before_backward() {
  if (!has_stopped_) {
    if (!is_complete() || !may_end() || has_too_many() || !is_on_own_ground()) return;
    if (!can_unwind_to(this)) return;
    count(live_counters.early_stops);
    has_stopped_ = true;
  } else if (!is_on_own_ground() || !can_unwind_to(this)) {
    return;
  }
  stop();
}

// A recompute is not stopped inside a backward. The code after that backward may save nothing, so
// that no save could stop it, and may write to an argument in place before forward does.
void Filler::stop_after_backward() {
  if (view_.is_settled || !is_complete() || !is_on_own_ground() || !can_unwind_to(this)) return;
  if (!has_stopped_) count(live_counters.early_stops);
  has_stopped_ = true;
  stop();
}

bool Filler::is_on_own_ground() const {
  return std::this_thread::get_id() == owner_ && seam::graph_task_id() == task_at_start_ &&
         region_.body->can_be_stopped() && std::uncaught_exceptions() == uncaught_at_start_;
}

}  // namespace remat
