#pragma once
// Where to checkpoint a chain of stages: plans, what they cost, the fastest one under a byte
// budget.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "remat/export.h"
#include "remat/move.h"
#include "remat/options.h"

namespace remat {

namespace detail {
class FrontierTable;  // lib/plan/solver.h
}

/// The cost of one stage of a chain: time in [s], memory in [bytes], each storage once. Parameters
/// and their gradients are in no budget. All numbers are finite and not negative, but for those
/// that say "negative".
struct StageCost {
  double forward_s = 0;   ///< [seconds] of a forward in grad mode
  double backward_s = 0;  ///< [seconds] of its backward
  /// [seconds] of a forward that early stop ends at the stage's last save; at most `forward_s`.
  /// Negative: `forward_s`. A stage that saves only its input has 0.
  double forward_to_last_save_s = -1;
  int64_t output_bytes = 0;  ///< what the stage returns
  /// [bytes] that autograd keeps and that are neither the stage's input nor its output nor a
  /// parameter.
  int64_t saved_bytes = 0;
  /// [bytes] at the peak of a forward that saves, beyond all that is named here.
  int64_t forward_tmp_bytes = 0;
  /// [bytes] at the peak of a backward, beyond all that is named here.
  int64_t backward_tmp_bytes = 0;
  int64_t grad_bytes = 0;    ///< the gradient of the output
  bool saves_output = true;  ///< whether the output is among what autograd keeps of the stage
  /// Instead of `forward_tmp_bytes` where nothing is saved, as in a region's first run. Tensors
  /// that `saved_bytes` counts otherwise are temporaries then. Negative: `forward_tmp_bytes`.
  int64_t unsaved_tmp_bytes = -1;
  /// [bytes] of `saved_bytes` that go away when the saved tensors of the stage move.
  int64_t movable_bytes = 0;
  /// True if `output_bytes` go away when the stage behind, or a region that begins with it, moves
  /// its input.
  bool has_movable_output = false;
  /// [bytes] that a backward has made, beyond `grad_bytes`, when it first reads a saved tensor: a
  /// region that ends with the stage is computed again beside them.
  int64_t first_read_tmp_bytes = 0;
  /// Instead of `forward_tmp_bytes` in a recompute that early stop ends in the stage: beyond
  /// `saved_bytes`, and the output if autograd keeps it. Negative: `forward_tmp_bytes`.
  int64_t stopped_tmp_bytes = -1;
  /// True if autograd keeps the input of the stage. If not, it goes away when the
  /// stage has run forward, unless others hold it: the stage before it, which saves its output, the
  /// caller, or a region that begins with the stage and is in no other one.
  bool saves_input = true;
  /// All that there is of the stage at the peak of its backward: what autograd keeps, both
  /// gradients, what is made; but not the input, which others hold to the end. Negative: the sum of
  /// what is named here. What is kept dies operator by operator.
  int64_t backward_bytes = -1;
  /// `backward_bytes` with the input, which a region that begins with the stage holds until all its
  /// saved tensors are read. Negative: both together.
  int64_t region_backward_bytes = -1;
  /// `backward_bytes` with the input, if autograd alone keeps it. Negative: both together.
  int64_t lone_backward_bytes = -1;
};

/// The cost of copying saved tensors to the place where they wait, and back. No number is negative.
struct MoveCost {
  double store_s_per_byte = 0;  ///< [seconds per byte] of copies there, with nothing beside them
  double load_s_per_byte = 0;   ///< [seconds per byte] of copies back
  /// By which share of these seconds the program takes longer beside which they run; above 1 where
  /// preparing copies takes longer than copying.
  double held_up_share = 0;
};

/// A chain of stages, each fed with the output of the one before; the last is the loss.
struct ChainCost {
  int64_t input_bytes = 0;          ///< for the record: budgets do not count the input
  int64_t input_grad_bytes = 0;     ///< the gradient of the input; 0 if it takes none
  std::vector<StageCost> stages{};  ///< in the order in which they run
  /// Share by which the allocator takes more than it is asked for: its rounding at the measured
  /// peaks. Budgets do not count it; `free_budget` takes it off.
  double rounding = 0;
  /// None: nothing moves.
  std::optional<MoveCost> moving{};
  /// Casts of weights that autocast's cache keeps beyond their stages, where it is around all of
  /// them. They count in every peak, from beginning to end, and are in no stage's bytes.
  int64_t cached_cast_bytes = 0;
  /// [bytes] that the caller of `backward()` holds of the last stage until it returns: the result
  /// and its gradient. They count in the backward peaks of all stages before that one.
  int64_t held_to_end_bytes = 0;
};

/// Stages `first` to `last`, which one `checkpoint()` call runs.
struct PlanRegion {
  int64_t first = 0;  ///< counted from 1
  int64_t last = 0;   ///< inclusive
  friend bool operator==(const PlanRegion&, const PlanRegion&) = default;
};

/// The regions of a chain of stages: a tree of nested `checkpoint()` calls and nothing else. As
/// text, with stages counted from 1:
///
///     plan := '[' item (' ' item)* ']'        item := stage | 'ck' plan | 'mv[' item ']'
///
/// for example "[ck[ck[1] 2] ck[3] 4 5]". What autograd saves of an item in 'mv[]' (of a region:
/// its input) waits elsewhere until backward comes near: "[1 mv[2] mv[ck[3 4]] 5]". Such an item is
/// in no region, and is not the last one. A value: copied freely, never changed.
class REMAT_API Plan {
 public:
  /// `regions` in the order in which they open: by first stage, the outer one before those inside.
  /// Throws `c10::ValueError` if `stages` is below 1, or regions overlap or are out of order.
  /// `moved`: the first stages of items that move what they save, in order; throws for one that
  /// begins no item outside of regions, and for the last item.
  explicit Plan(int64_t stages, std::vector<PlanRegion> regions = {},
                std::vector<int64_t> moved = {});
  /// Reads exactly what `to_string` writes. Throws `c10::ValueError` with the position for anything
  /// else: stages that are missing, repeated or out of order, an empty bracket, other spaces.
  static Plan parse(std::string_view text);
  std::string to_string() const;  ///< the text above

  int64_t stages() const { return stages_; }  ///< of the chain
  int64_t depth() const;                      ///< the deepest nesting; 0 without regions
  /// The number of regions.
  int64_t frames() const { return static_cast<int64_t>(regions_.size()); }
  /// In the order in which they open.
  const std::vector<PlanRegion>& regions() const { return regions_; }
  /// The first stages of the items that move what they save, in order.
  const std::vector<int64_t>& moved() const { return moved_; }
  /// How often forward, with one backward and early stop on, calls each stage: once, and once for
  /// every region around it whose recompute gets that far.
  std::vector<int64_t> calls() const;

  friend bool operator==(const Plan&, const Plan&) = default;

 private:
  void check_moved() const;

  int64_t stages_;
  std::vector<PlanRegion> regions_;
  std::vector<int64_t> moved_;
};

/// Assumptions of `solve` and `simulate`.
struct SolveOptions {
  int64_t max_depth = 0;    ///< of nesting; 0: any
  bool early_stop = true;   ///< as in the `CheckpointOptions` that the plan will run with
  double frame_cost_s = 0;  ///< paid once per region: bookkeeping, random state
  /// 0: exact. Otherwise in [0, 1): points of inner frontiers that are faster than the one before
  /// by less than this share are dropped. The time beyond one forward is then at most 1 / (1 -
  /// eps)^(stages - 1) times the least one, for every budget, and usually within eps of it; the
  /// first and the last point are exact.
  double eps = 0;
};

/// One point of a frontier: a peak, and the least time that it takes.
struct FrontierPoint {
  int64_t bytes = 0;   ///< the peak beyond the input
  double extra_s = 0;  ///< recomputing: seconds beyond one forward and one backward
};

/// No plan fits into the budget.
class REMAT_API InfeasibleBudget : public c10::ValueError {
 public:
  /// An error with this text.
  InfeasibleBudget(std::string message, int64_t minimum_bytes);
  /// The smallest budget for which there is a plan.
  int64_t minimum_bytes() const { return minimum_bytes_; }

 private:
  int64_t minimum_bytes_;
};

/// The result of `solve`: for every budget the least time. Copies share the tables it was computed
/// with, from which plans are read off when they are asked for. Any thread.
class REMAT_API Frontier {
 public:
  /// Bytes rise and seconds fall strictly from point to point; the last one recomputes nothing.
  const std::vector<FrontierPoint>& points() const { return points_; }
  /// The fastest plan whose peak is at most `budget_bytes` beyond the input; among the equally fast
  /// ones one of the smallest peak. Throws `InfeasibleBudget` below the first point.
  Plan plan(int64_t budget_bytes) const;

 private:
  explicit Frontier(std::shared_ptr<const detail::FrontierTable> table);
  friend Frontier solve(const ChainCost& cost, const SolveOptions& options);

  std::shared_ptr<const detail::FrontierTable> table_;
  std::vector<FrontierPoint> points_;
};

/// The exact frontier of time and memory over all plans whose last stage is in no region, for every
/// budget at once: the recurrence of rotor (Beaumont et al. 2019, "Optimal checkpointing for
/// heterogeneous chains") on staircases instead of memory slots, with early stop, the depth limit
/// and the cost of a frame.
///
/// A region around the last stage would be recomputed at once. It pays where what that stage has
/// for a moment in forward is larger beside what it saves than all that comes after: cut such a
/// stage in two.
///
/// With `ChainCost::moving`, what stages and regions outside of other regions save may wait
/// elsewhere. The model: whole values and one channel, on which the copies of one item (a stage or
/// a region) run beside the item behind it. Its forward ends when they have been written, and they
/// are read back from the beginning of its backward; both times the bytes are still, or again, in
/// memory. The program waits for what takes longer than that forward, or than that backward with
/// its first recompute. The search is exact in this model.
///
/// Cost: cubic in the number of different stages times the number of points; chains of equal stages
/// are much cheaper. Measured: bench/RESULTS.md. The points take 16 bytes each while the `Frontier`
/// lives.
/// Throws `c10::ValueError` for costs or options out of range, and for bytes that add up to more
/// than an int64_t holds.
REMAT_API Frontier solve(const ChainCost& cost, const SolveOptions& options = {});

/// The result of `simulate` for a plan.
struct Simulation {
  int64_t peak_bytes = 0;        ///< beyond the input
  double extra_s = 0;            ///< beyond one forward and one backward
  std::vector<int64_t> calls{};  ///< how often forward calls each stage
  int64_t frames = 0;            ///< regions
  int64_t depth = 0;             ///< the deepest nesting
};

/// Returns the cost of a plan: the rules of regions applied to sizes, event by event, without the
/// solver's recurrence.
/// Uses `early_stop` and `frame_cost_s` of the options. Time: the number of stage calls.
/// Throws `c10::ValueError` as `solve`, and if plan and cost have different numbers of
/// stages.
REMAT_API Simulation simulate(const ChainCost& cost, const Plan& plan,
                              const SolveOptions& options = {});

/// How `measure` runs each stage.
struct MeasureOptions {
  int64_t warmup = 1;   ///< runs that are not timed
  int64_t repeats = 5;  ///< timed runs, the least of which is kept
  /// Device whose bytes and time are measured; none: the sample's device.
  std::optional<c10::Device> device{};
  bool early_stop = true;  ///< of the regions in which a stage is measured
  /// Place to which saved tensors and outputs of stages are tried to move; none: plans do not move
  /// anything.
  std::optional<MoveOptions> moving{};
};

/// Runs each stage forward and backward on what the one before made of `sample`, and says what it
/// cost. Grad mode is on; `sample` takes part in backward if it requires grad.
///
/// Bytes are those of storages, so a view counts with all that it keeps alive; saved tensors whose
/// storage outlives the stage's graph (parameters, constants) count nothing. Where autocast is on
/// around `measure`, as it should be if it is around the program, the casts in its cache are
/// counted apart (`cached_cast_bytes`), and the cache is emptied. Temporaries are what the device's
/// allocator gives out (`MemoryMeter`), to whichever thread: measure while no other one allocates
/// there, or its bytes are among them. Times on the CPU are those of the calling thread; on an
/// accelerator those between events on the current stream, each run alone and waited for, so that a
/// stage whose operators are queued more slowly than they run costs what queueing them does.
/// Parameters have gradients throughout, as in training that sets them to zero: a program that
/// drops them (`zero_grad(set_to_none=true)`) needs their bytes on top.
///
/// Hooks of parameters do not run: no optimizer steps. In a region the stages run as if it were not
/// there. Afterwards parameters have the `.grad` and the hooks they had, and the default generators
/// of the CPU and of the device their states. Other side effects of running a stage stay: buffers,
/// members of modules, generators of its own. Where they matter, measure the stages of a copy of
/// the module (`module->clone()`). Throws what a stage throws; `c10::ValueError` for no stages or
/// repeats, an undefined sample, a stage that writes to its input in place (no region could begin
/// with it), or one that returns an undefined tensor; `CheckpointError` (`Unsupported`) if the
/// device's allocator does not tell its bytes.
REMAT_API ChainCost measure(const std::vector<Stage>& stages, const at::Tensor& sample,
                            const MeasureOptions& options = {});

/// The budget [bytes] for a plan of `cost` in what `device` has free now (`free_bytes`): less
/// `margin`, a share in [0, 1) of it for pieces that fit nothing, and less the rounding that was
/// measured. What the chain's input, parameters and gradients take is to be there already.
/// Throws as `free_bytes`; `c10::ValueError` for a margin or a rounding out of range.
/// Example: examples/budget.cpp.
REMAT_API int64_t free_budget(const ChainCost& cost, c10::Device device, double margin = 0.05);

/// Runs the stages on `input` with nested `checkpoint()` calls as the plan says, all with
/// `options`; the stages a region runs are added to its name. What the plan moves waits where
/// `moving` says (common rules: hooks.h, above SaveOnCpuGuard); what cannot be written stays in
/// memory, with a warning. The stages are copied once, and are kept as long as the graph. Memory:
/// at most what `simulate` says for measured costs, with the loss and its gradient, which the
/// caller of `backward()` holds to its end.
/// Throws `c10::ValueError` if plan and stages have different numbers, and for a plan that moves if
/// `moving` has no directory and the input is the CPU's, or no file can be made there; else as
/// `checkpoint()`.
/// Example: examples/budget.cpp.
REMAT_API at::Tensor run(const Plan& plan, const std::vector<Stage>& stages, at::Tensor input,
                         const CheckpointOptions& options = {}, const MoveOptions& moving = {});

// Plans by formula, for chains that nobody measured. All throw `c10::ValueError` if `stages` is
// below 1 or the second number is out of its range.

/// The least stage calls for equal stages with `snapshots` >= 1 states stored, the input among them
/// (Griewank and Walther 2000, "Algorithm 799: revolve"). At most snapshots + 2 outputs of stages,
/// the input among them, are alive at once.
REMAT_API Plan revolve_plan(int64_t stages, int64_t snapshots);
/// The least stage calls for equal stages where each of `units` >= 1 holds a state or all that one
/// stage saves (Maddison 2024, "Step-based checkpointing with high-level algorithmic
/// differentiation"). O(stages^2 units) at worst.
REMAT_API Plan mixed_plan(int64_t stages, int64_t units);
/// `segments` runs of stages whose lengths differ by at most one, longer ones first; all but the
/// last are regions. 9 stages in 5 segments: 2, 2, 2, 2, 1.
REMAT_API Plan balanced_plan(int64_t stages, int64_t segments);
/// Returns the plan of `torch.utils.checkpoint.checkpoint_sequential`: segments of stages /
/// segments stages, the last one longer and no region. 9 stages in 5 segments: 1, 1, 1, 1, 5.
REMAT_API Plan torch_sequential_plan(int64_t stages, int64_t segments);
/// The left half is a region, the right half is not, and both again. Depth: log2 of the stages.
REMAT_API Plan halving_plan(int64_t stages);

}  // namespace remat
