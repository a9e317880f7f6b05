#pragma once
// Checks of chains and plans, and computations that the solver and the simulator share.

#include <array>
#include <cstdint>
#include <vector>

#include "remat/plan.h"

namespace remat {

// Note [Who holds an input]
// The holder of a stage's input during the stage's backward is one of three.
// * Others: the stage before, which saves its output, or the program's caller. They hold the input
//   until that backward has ended, and longer.
// * Region: an outermost region that begins with the stage. It holds the input until its last slot
//   is gone, which is in the backward of its first stage, whether or not that stage saves its
//   input. A nested region gets its input from a slot of the region around and passes it on.
// * Nobody: autograd alone. The input lives as long as it is saved: it is freed when the stage has
//   run forward, or in the middle of the stage's backward.

/// The holder of a stage's input in its backward, besides the tensors that autograd saves of the
/// stage. See Note [Who holds an input].
enum class InputHolder : uint8_t { Others, Region, Nobody };

/// Returns the costs with every number that a caller may leave out, and the seconds of early stop.
/// The three members of backward bytes are then the peaks by `InputHolder`, no fewer than at the
/// begin and end of a backward. Throws `c10::ValueError` for costs or options that are out of
/// range. After it, sums of bytes cannot overflow.
ChainCost complete(ChainCost cost, const SolveOptions& options);

/// Returns the bytes alive at the peak of the backward of a stage of a complete cost. The input
/// counts unless others hold it.
inline int64_t backward_peak(const StageCost& stage, InputHolder holder) {
  constexpr std::array peaks{&StageCost::backward_bytes, &StageCost::region_backward_bytes,
                             &StageCost::lone_backward_bytes};
  return stage.*peaks[static_cast<std::size_t>(holder)];
}

/// Returns whether the plan moves any item.
bool moves_anything(const Plan& plan);

/// Returns the most [seconds] that copies of all saved tensors of the stage take, out and back.
double seconds_of_copies(const MoveCost& moving, const StageCost& stage);

/// A stage, or (negative) a region, by its place in Plan::regions(), from 1.
using PlanItem = int64_t;
/// Returns the items of each region, in order; index 0 is the program around all regions.
std::vector<std::vector<PlanItem>> items_of(const Plan& plan);

}  // namespace remat
