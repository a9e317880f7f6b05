#pragma once
// What is asked of every chain and plan before anything is computed with them.

#include <vector>

#include "remat/plan.h"

namespace remat {

/// Throws `c10::ValueError` for costs or options that are out of range. Afterwards sums of bytes
/// cannot overflow: everything the chain could ever hold adds up to an int64_t.
void check(const ChainCost& cost, const SolveOptions& options);

/// What the stage costs under the policy of that number; null if it has no such cost.
const KeepingCost* keeping_with(const StageCost& stage, int64_t policy);

/// [seconds] at most, of copying all that the stage saves, and back.
double seconds_of_copies(const MoveCost& moving, const StageCost& stage);

/// An item is a stage, or (negative) a region, by its place in Plan::regions(), from 1.
using PlanItem = int64_t;
/// What stands in each region, in order; 0 is the program around them.
std::vector<std::vector<PlanItem>> items_of(const Plan& plan);

}  // namespace remat
