#pragma once
// The exact frontier of time and memory over all plans, as a table over all sub-chains.

#include <cstdint>
#include <deque>
#include <vector>

#include "lib/plan/staircase.h"
#include "remat/plan.h"

namespace remat::detail {

// Note [The recurrence]
// V(s,t,m) is the least time of recomputing for stages s..t, which some region ends with t (or the
// chain does), with m bytes beyond x_{s-1}, while the gradient of x_t is alive or to come.
//
//     V(s,s,m) = 0                                      if m >= saving(s,s)
//     V(s,t,m) = min of
//       V(s+1,t, m - saved_s - x_s)                     if m >= saving(s,t): stage s plain
//       V(q,t, m - x_{q-1}) + sweep(s,q-1) + V(s,q-1,m) if m >= sweeping(s,q-1) + d_t: a region s..q-1
//
// sweep(s,e) is the forward of stages s..e-1, of e up to its last save, and the cost of a frame.
// As a function of m, V is a staircase; all budgets are solved at once, without rounding.
//
// Three things differ from the paper (rotor). A recompute ends early, so its last stage may never
// have an output. During the program's first forward there is no gradient yet, so stages up to the
// last one (t = L) are charged none. The last output is held by the caller, saved or not.
//
// With a depth limit there is one table per level; regions of a level take their insides from the
// level below. Without one a level is its own inside.
//
// Note [Regions that keep]
// A stage may be a region with a policy that keeps some results of operator calls. Each way in which
// it can keep, c, is one more branch of the minimum:
//
//     V(s+1,t, m - kept_c - x_s) + extra_c              if m >= keeping(s,c)
//
// where keeping(s,c) is the larger one of what its forward takes and of what its recompute and backward
// take with the gradient of x_s. These are measured as one peak (KeepingCost::backward_bytes), since
// a replay hands out kept results in an order of its own.
//
// Only for t = L, outside of all other regions. Inside of one, the first run would drop what is kept, the
// recompute of the region around would make and hold it, and the stage's own recompute would release
// it as it reads: another peak than outside, and measured otherwise. It would rarely serve: who has bytes to
// keep results has them to save one stage's input instead of nesting. Regions of several stages
// keep nothing, either: their recompute holds the saves of all of them at once, so a region for each
// stage, which takes one input more, is nearly always better. In this model the search is exact, and as
// cheap as without: a branch for each stage and way.
//
// Sub-chains that end with the last stage share no staircase (Note [Equal stages]: equal ones have the same
// number of stages), so stages may be equal and keep differently.
//
// Note [Whole ticks]
// Seconds are rounded to multiples of a power of two, so small that the largest sum (the seconds of
// all stages and frames times the stages) still fits into 62 bits. Sums then do not depend on their
// order, and with costs that are whole numbers nothing is rounded at all. Costs like 2/3 are rounded
// before they come here: three of them and two whole seconds are meant to be equal and are not. So
// a gain below 2^-50 of the largest sum counts as none; with floating point or without the limit a
// staircase would collect points that differ by rounding only.
//
// Note [Equal stages]
// V(s,t) depends on nothing but the costs of its stages and the gradient before them. Sub-chains
// with equal costs share one staircase, which makes n equal blocks a table of order n.

/// The table holds the staircases of all sub-chains, and the plans that attain them.
class FrontierTable {
 public:
  FrontierTable(const ChainCost& cost, const SolveOptions& options);

  std::vector<FrontierPoint> points() const;
  /// Returns the fastest plan for the budget of a point.
  Plan plan(int64_t bytes) const;

 private:
  struct StageTicks {
    int64_t forward = 0, to_last_save = 0;
    std::vector<int64_t> keeping{};  // in the order of StageCost::keeping
  };
  /// A level is one depth: the number of the staircase of each sub-chain, and where the insides of
  /// its regions are.
  struct Level {
    std::vector<int32_t> stairs;
    std::size_t inside = 0;
    bool has_regions = true;
  };

  const StageCost& stage(int64_t k) const { return cost_.stages[static_cast<std::size_t>(k - 1)]; }
  int64_t grad_before(int64_t s) const {
    return s == 1 ? cost_.input_grad_bytes : stage(s - 1).grad_bytes;
  }
  /// The gradient that waits while a recompute runs stages up to t; in forward there is none.
  int64_t grad_waiting(int64_t t) const { return t < num_stages_ ? stage(t).grad_bytes : 0; }
  int64_t unsaved_tmp(int64_t k) const {
    return stage(k).unsaved_tmp_bytes >= 0 ? stage(k).unsaved_tmp_bytes
                                           : stage(k).forward_tmp_bytes;
  }
  std::size_t cell(int64_t s, int64_t t) const {
    return static_cast<std::size_t>((s - 1) * num_stages_ + t - 1);
  }
  const Staircase& stairs(const Level& level, int64_t s, int64_t t) const {
    return staircases_[static_cast<std::size_t>(level.stairs[cell(s, t)])];
  }
  int64_t bytes_to_save(int64_t s, int64_t t) const;
  int64_t bytes_to_keep(int64_t s, const KeepingCost& keeping) const;
  int64_t sweep_ticks(int64_t s, int64_t e) const;

  void scale_seconds();
  void find_equal_chains();
  void measure_sweeps();
  /// Fills the sub-chains that end before the last stage, or those that end with it.
  void fill(std::size_t number, bool is_last);
  const Level* below_of(const Level& level, int64_t s, int64_t t) const;
  void solve_chain(Level& level, int64_t s, int64_t t);
  /// Lowers what `solve_chain` found for stages s to the last one by the ways to keep of stage s.
  void solve_keeping(Level& level, int64_t s);

  const ChainCost cost_;
  const SolveOptions options_;
  const int64_t num_stages_;
  int exponent_ = 0;  // a tick is 2^exponent_ seconds
  int64_t frame_ticks_ = 0;
  std::vector<StageTicks> ticks_;        // by stage
  std::vector<int64_t> forward_before_;  // ticks of all stages before
  std::vector<int32_t> class_of_;        // equal for sub-chains of equal costs
  std::vector<int64_t> sweep_bytes_;     // to run the stages of a sub-chain without saving
  std::vector<Level> levels_;            // the last one is the chain's
  std::deque<Staircase> staircases_;
  Envelope envelope_;
};

}  // namespace remat::detail
