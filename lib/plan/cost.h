#pragma once
// The checks of what a caller says of a chain, before anything is computed with it.

#include "remat/plan.h"

namespace remat {

/// Throws `c10::ValueError` for costs or options that are out of range. Afterwards sums of bytes
/// cannot overflow: everything the chain could ever hold adds up to an int64_t.
void check(const ChainCost& cost, const SolveOptions& options);

}  // namespace remat
