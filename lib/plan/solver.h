#pragma once
// The exact frontier of time and memory over all plans, as a table over all sub-chains.

#include <array>
#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "lib/plan/cost.h"
#include "lib/plan/staircase.h"
#include "remat/plan.h"

namespace remat::detail {

// Note [The recurrence]
// V(s,t,h,m) is the least recompute time for stages s..t within m bytes beyond x_{s-1}. Stage t is
// the last one of some region or of the chain, and the gradient of x_t is alive or to come. d_t is
// that gradient with the memory that the backward of t makes before it first reads, which is when t
// is recomputed. h is the holder of x_{s-1} in the backward of s: see Note [Who holds an input].
//
//     V(s,s,h,m) = 0, if m >= saving(s,s,h)
//     V(s,t,h,m) = min of
//       stage s plain, if m >= saving(s,t,h):
//         V(s+1,t,h', m - saved_s - x_s + freed)
//       a region s..q-1, if m >= sweeping(s,q-1) + d_t:
//         V(q,t,nobody, m - x_{q-1}) + sweep(s,q-1) + V(s,q-1,h",m)
//
// sweep(s,e) is the forward time of stages s..e-1 and of e up to its last save, and the cost of a
// frame. freed is x_{s-1} if neither stage s saves it nor another owner holds it, else 0. h' is
// others if stage s saves its output, else nobody. h" is h, except that a region of the outermost
// level holds an input that has no other holder. As a function of m, V is a staircase; all budgets
// are solved at once, without rounding.
//
// Three things differ from the paper (rotor). A recompute ends early, so its last stage may never
// have an output. The program's first forward has no gradient yet, so stages up to the
// last one (t = L) are not charged for one. The caller holds the last output, saved or not.
//
// The caller of backward() holds its result and gradient to the end (ChainCost::held_to_end_bytes),
// beside the backward of all stages but the last. So for t = L, m counts bytes beyond these. The
// need before the last backward is less by as much, and so is that of the last backward, which
// counts these bytes itself.
//
// With a depth limit there is one table per level; regions of a level take their insides from the
// level below. Without a limit, a level is its own inside.
//
// Note [What moves]
// With ChainCost::moving, an item outside of regions (a stage, a region s..q-1) may move its saved
// tensors: a region its input, a stage its input and part of its saved bytes. Moved bytes are in
// memory while the item behind runs forward, and again while it runs backward; in between they are
// elsewhere. So the outermost level, and only that, has one more state: p, the bytes that the item
// before moves. With m' = m - p,
//
//     V(s,p,m) = min of
//       V(s+1, b, m' + p - saved_s - x_s + freed + moved) + wait   if m' >= saving(s,L,h)
//       V(q, b, m' + p - x_{q-1} + moved) + sweep(s,q-1) + V(s,q-1,h",m') + wait
//                                                                  if m' >= sweeping(s,q-1)
//
// Without a move of the item, b and moved are 0. With one, both are the moved bytes: b is the p of
// the next item, and moved gives back charges (x_{s-1}, which the chain before paid for, and part
// of saved_s). wait is the time by which copying p out exceeds the item's forward, and copying it
// back exceeds the item's backward with its first recompute. The item that moves also pays for the
// time by which its copies hold up the program.
//
// An input moves only if the item alone holds it, which the h of the state tells. There are as many
// different p as stages with different inputs. So this search is of the order of the rest, and far
// less for equal stages.
//
// Note [Whole ticks]
// Seconds are rounded to multiples of a power of two (ticks). A tick is so small that the largest
// sum (the seconds of all stages and frames times the stages) still fits into 62 bits. Sums then do
// not depend on their order, and whole numbers of seconds are not rounded at all.
//
// Costs like 2/3 are rounded before they come here: three of them are meant to equal two whole
// seconds, and do not. So a gain below 2^-50 of the largest sum does not count. With floating point
// or without this limit, a staircase would collect points that differ by rounding only.
//
// Note [Equal stages]
// V(s,t,h) depends only on the costs of its stages, on the gradient before them, and on h through
// the backward bytes of s and through freed. Sub-chains with equal costs share one staircase, so n
// equal blocks need a table of order n. Different h share one, too, if both numbers are equal,
// mostly for stages that save their inputs.

/// The bytes of a chain's stages. Stages count from 1.
struct ChainBytes {
  explicit ChainBytes(ChainCost complete)
      : cost(std::move(complete)), num_stages(static_cast<int64_t>(cost.stages.size())) {}
  const StageCost& stage(int64_t k) const { return cost.stages[static_cast<std::size_t>(k - 1)]; }
  int64_t grad_before(int64_t s) const {
    return s == 1 ? cost.input_grad_bytes : stage(s - 1).grad_bytes;
  }
  /// Returns the bytes that wait while a recompute runs stages up to t: the gradient, and the
  /// memory that the backward of t has made by then. 0 in forward, which has no gradient yet.
  int64_t grad_waiting(int64_t t) const {
    return t < num_stages ? stage(t).grad_bytes + stage(t).first_read_tmp_bytes : 0;
  }
  int64_t input_bytes(int64_t s) const { return s == 1 ? 0 : stage(s - 1).output_bytes; }
  /// Returns the bytes that the backward of stage s needs beyond its input.
  int64_t backward_bytes(int64_t s, InputHolder holder) const {
    return backward_peak(stage(s), holder) - (holder == InputHolder::Others ? 0 : input_bytes(s));
  }
  /// Returns the bytes of the input that are freed when stage s has run forward.
  int64_t freed_bytes(int64_t s, InputHolder holder) const {
    return holder == InputHolder::Nobody && !stage(s).saves_input ? input_bytes(s) : 0;
  }
  /// Returns the bytes that stage s leaves behind when it has run forward, beyond its input.
  int64_t charge(int64_t s, InputHolder holder) const {
    return stage(s).saved_bytes + stage(s).output_bytes - freed_bytes(s, holder);
  }
  /// Returns the bytes that exist only from the last backward on, which m leaves out.
  int64_t held_to_end(int64_t t) const { return t == num_stages ? cost.held_to_end_bytes : 0; }

  const ChainCost cost;
  const int64_t num_stages;
};

/// The table holds the staircases of all sub-chains, and the plans that attain them.
class FrontierTable {
 public:
  /// `cost`: a complete one.
  FrontierTable(ChainCost cost, const SolveOptions& options);

  std::vector<FrontierPoint> points() const;
  /// Returns the fastest plan for the budget of a point.
  Plan plan(int64_t bytes) const;

 private:
  struct StageTicks {
    int64_t forward = 0, to_last_save = 0;
  };
  /// One depth of nesting: the number of the staircase of each sub-chain and holder of its input,
  /// and the level with the insides of its regions.
  struct Level {
    std::vector<int32_t> stairs;
    std::size_t inside = 0;
    bool has_regions = true;
  };

  /// The bytes that the item before moves, and the other holder of the next item's input.
  /// See Note [What moves].
  struct Before {
    int64_t moved_bytes = 0;
    InputHolder holder = InputHolder::Others;
    friend auto operator<=>(const Before&, const Before&) = default;
  };
  /// An item with which the outermost level can continue.
  struct Item {
    int64_t first, next;    // first stage, and first stage behind the item
    bool is_region, moves;  // moves: the saved tensors; of a region, its input
    int64_t need;           // bytes beyond those that the item before moves
    int64_t charge;         // bytes that stay until backward, less those that are freed
    int64_t ticks;          // without its inside
    Before then;
    InputHolder inside;  // of a region
  };

  static constexpr std::array holders{InputHolder::Others, InputHolder::Region,
                                      InputHolder::Nobody};
  static InputHolder holder_behind(bool is_held) {
    return is_held ? InputHolder::Others : InputHolder::Nobody;
  }
  /// Returns the holder of a region's input inside the region, in a sub-chain that ends with t.
  InputHolder holder_inside(InputHolder holder, int64_t t) const {
    return t == chain_.num_stages && holder == InputHolder::Nobody ? InputHolder::Region : holder;
  }
  std::size_t sub_chain(int64_t s, int64_t t) const {
    return static_cast<std::size_t>((s - 1) * chain_.num_stages + t - 1);
  }
  std::size_t cell(int64_t s, int64_t t, InputHolder holder) const {
    return holders.size() * sub_chain(s, t) + static_cast<std::size_t>(holder);
  }
  const Staircase& stairs(const Level& level, std::size_t cell) const {
    return staircases_[static_cast<std::size_t>(level.stairs[cell])];
  }
  int64_t bytes_to_save(int64_t s, int64_t t, InputHolder holder) const;
  int64_t sweep_ticks(int64_t s, int64_t e) const;
  /// Returns the bytes to run a region of stages s to e for the first time, in a sub-chain that
  /// ends with t.
  int64_t bytes_to_sweep(int64_t s, int64_t e, int64_t t) const {
    return sweep_bytes_[sub_chain(s, e)] + chain_.grad_waiting(t) - chain_.held_to_end(t);
  }
  void scale_seconds();
  void find_equal_chains();
  void measure_sweeps();
  /// Fills the sub-chains that end before the last stage, or with `is_last` those that end with it.
  void fill(std::size_t number, bool is_last);
  /// Fills the sub-chains that end with the last stage, which is outside of all regions.
  void fill_outermost(std::size_t number);
  const Level* below_of(const Level& level, std::size_t cell) const;
  void solve_chain(Level& level, int64_t s, int64_t t, InputHolder holder);
  // solver_moves.cpp:
  /// Fills the sub-chains that end with the last stage where tensors may move.
  void fill_moving();
  /// Returns the items that can begin with stage s, in the order in which ties are broken.
  std::vector<Item> items_from(int64_t s, const Before& before) const;
  int64_t ticks_of_waiting(const Before& before, const Item& item) const;
  const Staircase& inside_of(const Item& item) const;
  Plan plan_moving(int64_t bytes) const;

  /// Stages `first` to `last` on a level, within `bytes`.
  struct Part {
    int64_t first, last, bytes;
    std::size_t level;
    InputHolder holder = InputHolder::Others;
  };
  /// Appends the regions of the fastest plan of a part.
  void append_regions(const Part& part, std::vector<PlanRegion>& regions) const;

  const ChainBytes chain_;
  const SolveOptions options_;
  int exponent_ = 0;  // a tick is 2^exponent_ seconds
  int64_t frame_ticks_ = 0;
  std::vector<StageTicks> ticks_;                          // by stage
  std::vector<int64_t> forward_before_, backward_before_;  // ticks of all stages before
  std::vector<int32_t> class_of_;     // by cell; equal for sub-chains of equal costs
  std::vector<int64_t> sweep_bytes_;  // bytes to run the stages of a sub-chain without saving
  std::vector<Level> levels_;         // the last one is the chain's
  std::deque<Staircase> staircases_;
  /// The staircases of the chain from each stage on, if tensors may move.
  std::vector<std::map<Before, Staircase>> moving_;
  double store_ticks_ = 0, load_ticks_ = 0, busy_ticks_ = 0;  // per byte
  Envelope envelope_;
};

}  // namespace remat::detail
