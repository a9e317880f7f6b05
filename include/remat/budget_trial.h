#pragma once
// Settings of budgets for tests and benches: the choice of the value to drop, its seed, and the
// table of costs. They apply to the whole process; ordinary programs do not need them. Change them
// only while no budget is alive.

#include <cstdint>
#include <vector>

#include "remat/export.h"

namespace remat::budget {

/// The ways to choose the value that is dropped next.
enum class Choice {
  Reverse,      ///< the library's own: Note [What is dropped first]
  Dtr,          ///< score of Dynamic Tensor Rematerialization, with exact costs of its neighbors
  LeastRecent,  ///< least recently used
  Size,         ///< largest
  Random        ///< any, by the seed
};

/// Sets the choice of all budgets. `seed`: the seed of `Choice::Random`.
REMAT_API void set_choice(Choice choice, uint64_t seed = 0);

/// The cost of one operator with one list of shapes.
struct CallCost {
  uint64_t call = 0;  ///< hash of operator and shapes
  float seconds = 0;  ///< [seconds] least time of the first calls
};

/// Returns the table of costs.
REMAT_API std::vector<CallCost> costs();
/// Replaces the table by fixed costs.
REMAT_API void set_costs(const std::vector<CallCost>& costs);
/// Sets the number of calls from which a cost is learned. Default: 3.
REMAT_API void learn_costs_from(uint32_t num_calls);

/// The work of a program; seconds come from the table of costs.
struct Work {
  double called_s = 0;  ///< [seconds] in operator calls, those of backward included; without views
  double rerun_s = 0;   ///< [seconds] in operator calls that ran again
  int64_t copies = 0;   ///< contents that were copied before an in-place rerun wrote to them
};

/// Begins to count work, from zero. Until `end_work`, budgets measure all operators, including
/// those that they do not record.
REMAT_API void begin_work();
/// Ends the count and returns it.
REMAT_API Work end_work();

}  // namespace remat::budget
