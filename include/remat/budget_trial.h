#pragma once
// Settings of budgets for tests and benches: the choice of the value to drop, its seed, and the
// table of costs. They belong to the process; programs need none of them. Change them only while no
// budget is alive.

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

/// Sets the choice of all budgets. `seed`: of `Choice::Random`.
REMAT_API void set_choice(Choice choice, uint64_t seed = 0);

/// The cost of one operator with one list of shapes.
struct CallCost {
  uint64_t call = 0;  ///< hash of operator and shapes
  float seconds = 0;  ///< [seconds] least time of the first calls
};

/// Returns the table of costs.
REMAT_API std::vector<CallCost> costs();
/// Replaces the table by costs that do not change any more.
REMAT_API void set_costs(const std::vector<CallCost>& costs);
/// Sets the number of calls from which a cost is learned. The default is 3.
REMAT_API void learn_costs_from(uint32_t num_calls);

/// The work of a program, its seconds by the table.
struct Work {
  double called_s = 0;  ///< in operator calls, of backward among them; views are left out
  double rerun_s = 0;   ///< in operator calls that ran again
  int64_t copies = 0;   ///< contents copied before a rerun in place wrote to them
};

/// Begins to count work, from zero. Until `end_work` budgets measure all operators, also those that
/// they do not record.
REMAT_API void begin_work();
/// Ends the count and returns it.
REMAT_API Work end_work();

}  // namespace remat::budget
