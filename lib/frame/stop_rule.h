#pragma once
// Decides where a recompute may end.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <thread>

#include "lib/frame/region.h"
#include "lib/frame/slots.h"
#include "lib/seam/engine.h"

namespace remat {

class UserRestore;

/// The progress of one recompute through the slots.
struct Progress {
  const SlotView view;
  /// True if tensors saved after the last slot are a difference. With early stop they are not:
  /// every needed tensor came before, and the recompute could have ended there.
  bool counts_rest;
  int64_t num_seen = 0, num_filled = 0;

  /// Returns whether the region's forward had returned when the recompute began.
  bool is_forward_over() const { return view.is_settled; }
  int64_t num_slots() const { return static_cast<int64_t>(view.is_needed.size()); }
  bool is_complete() const { return num_filled == view.num_needed; }
  /// Returns whether the recompute saved more tensors than forward, which is over.
  bool has_too_many() const { return view.is_settled && counts_rest && num_seen > num_slots(); }
};

/// A tensor that autograd saves in a recompute.
struct SavedNow {
  const at::Tensor& tensor;
  const at::Tensor* input;  ///< the input of a region inside of which it is an alias, or null
  uint64_t operator_number = 0;
  int64_t position = -1;
  /// Returns the tensor whose role and history count.
  const at::Tensor& judged() const { return input != nullptr ? *input : tensor; }
};

/// Decides where one recompute ends, on its thread. See Note [Where a stop may be thrown].
class StopRule {
 public:
  StopRule(const Region& region, const Slots& slots, const Progress& progress);

  /// Makes the recompute run to its end, unless forward has not returned yet.
  void forbid() { early_stop_ = !progress_.is_forward_over(); }
  /// Forbids a stop before a script function has returned, since only then its plan is known.
  void forbid_in_scripts() { may_stop_in_scripts_ = false; }
  /// Sets the restore whose buffers are compared, or null. The function writes to them, and is not
  /// stopped before it has done so.
  void set_written(UserRestore* written) { written_ = written; }
  /// Notes that the slot was filled, as the last one so far.
  void took(const Slot& slot);
  /// Returns whether the recompute ends with the save of this tensor, and notes that.
  /// `was_complete`: before this save; `is_comparing`: contents wait for their operator's end.
  bool ends_at(const SavedNow& now, bool was_complete, bool is_comparing);
  /// Returns whether the function will end soon by itself, since its language was asked for that.
  bool ends_soon() const;
  /// Called when no operator is under way, before work that a complete recompute must not do: it
  /// ends here. A backward of the function ran in the forward, and would accumulate its gradients
  /// again.
  void between_operators();
  /// Called when a backward of the function has returned. If forward is still waiting inside a
  /// backward, a recompute that became complete in it ends: the code after it has not run in
  /// forward yet.
  void after_backward();
  bool has_stopped() const { return has_stopped_; }
  /// Returns whether the recompute may be ended here, as far as thread, backward and function are
  /// concerned.
  bool is_on_own_ground() const;
  /// Ends the recompute, in the way of the function's language.
  [[noreturn]] void stop();

 private:
  bool may_end() const;
  bool wants_stop(bool is_comparing) const;
  bool can_stop(const SavedNow& now) const;
  void note_stop();
  void stop_outside_operator();

  const Region& region_;
  const Slots& slots_;
  const Progress& progress_;
  bool early_stop_;
  bool may_stop_in_scripts_ = true;
  bool must_finish_operator_ = false;
  bool has_stopped_ = false;
  uint64_t last_operator_ = 0;  // the operator that filled the last needed slot
  UserRestore* written_ = nullptr;
  const int64_t task_at_start_ = seam::graph_task_id();
  const std::thread::id owner_ = std::this_thread::get_id();
  const int uncaught_at_start_ = std::uncaught_exceptions();
};

}  // namespace remat
