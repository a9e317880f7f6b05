#pragma once
// What is asked of every chain and plan before anything is computed with them.

#include <cstdint>
#include <vector>

#include "remat/plan.h"

namespace remat {

/// Throws `c10::ValueError` for costs or options that are out of range. Afterwards sums of bytes
/// cannot overflow: everything the chain could ever hold adds up to an int64_t.
void check(const ChainCost& cost, const SolveOptions& options);

// Note [Who holds an input]
// When a stage runs backward its input may be held by the stage before it, which saves its output,
// and by the program's caller: until that backward has ended, and longer. A region outside of other
// regions holds its input until the last one of its slots is gone, which is in the backward of its
// first stage, whether that saves its input or not. One inside gets it from a slot of the region
// around, and hands it on. What nobody else holds lives as long as it is saved: it goes away when
// the stage has run forward, or in the middle of its backward.

/// Who holds the input of a stage in its backward, besides what autograd keeps of the stage.
/// See Note [Who holds an input].
enum class InputHolder : uint8_t { Others, Region, Nobody };

/// All that there is at the peak of the backward of stage k, with what is there at its beginning
/// and end; with the input, but for one that others hold.
int64_t backward_peak(const ChainCost& cost, int64_t k, InputHolder holder);

/// Whether anything of it waits elsewhere.
bool moves_anything(const Plan& plan);

/// [seconds] at most, of copying all that the stage saves, and back.
double seconds_of_copies(const MoveCost& moving, const StageCost& stage);

/// An item is a stage, or (negative) a region, by its place in Plan::regions(), from 1.
using PlanItem = int64_t;
/// What stands in each region, in order; 0 is the program around them.
std::vector<std::vector<PlanItem>> items_of(const Plan& plan);

}  // namespace remat
