#pragma once
// Other choices of the value to drop than the library's own, for comparison.

#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include "lib/budget/graph.h"
#include "remat/budget_trial.h"

namespace remat::budget {

/// The process's settings for tests and benches. The caller holds the graph's lock.
struct Trial {
  static Trial& get();
  Choice choice = Choice::Reverse;
  uint64_t seed = 0;
  bool counts_work = false;
  Work work{};
};

/// Returns the value that the choice of a trial drops; null if no value can be dropped. `now`: the
/// runtime's clock.
Value* choose_in_trial(Trial& trial, c10::ArrayRef<Value*> values,
                       c10::function_ref<bool(const Value&)> can_drop, double now);

}  // namespace remat::budget
