#pragma once
// Plans of regions for a chain of stages, and the fastest plan under a byte budget.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "remat/chain_cost.h"
#include "remat/export.h"
#include "remat/move.h"
#include "remat/options.h"

namespace remat {

namespace detail {
class FrontierTable;  // lib/plan/solver.h
}

/// A region of a plan: stages `first` to `last`, which one `checkpoint()` call runs.
struct PlanRegion {
  int64_t first = 0;  ///< counted from 1
  int64_t last = 0;   ///< inclusive
  friend bool operator==(const PlanRegion&, const PlanRegion&) = default;
};

/// The regions of a chain of stages: a tree of nested `checkpoint()` calls. The grammar of its
/// text, with stages counted from 1:
///
///     plan := '[' item (' ' item)* ']'        item := stage | 'ck' plan | 'mv[' item ']'
///
/// An example is "[ck[ck[1] 2] ck[3] 4 5]". In "[1 mv[2] mv[ck[3 4]] 5]" the saved tensors of stage
/// 2, and the input of the region, move away until backward needs them. An item in 'mv[]' is
/// outside of regions, and is not the last one. Plans are immutable values, which may be copied
/// freely.
class REMAT_API Plan {
 public:
  /// Makes a plan. `regions`: in the order in which they open, by first stage, outer ones before
  /// inner ones. `moved`: the first stages of items that move their saved tensors, in order.
  /// Throws `c10::ValueError` if `stages` is below 1, if regions overlap or are out of order, or if
  /// a stage in `moved` begins no item outside of regions or begins the last item.
  explicit Plan(int64_t stages, std::vector<PlanRegion> regions = {},
                std::vector<int64_t> moved = {});
  /// Parses the text of `to_string`. Throws `c10::ValueError` with the position for any other text:
  /// stages that are missing, repeated or out of order, an empty bracket, other spaces.
  static Plan parse(std::string_view text);
  std::string to_string() const;  ///< returns the text above

  int64_t stages() const { return stages_; }  ///< returns the number of stages
  int64_t depth() const;                      ///< returns the deepest nesting; 0 without regions
  /// Returns the number of regions.
  int64_t frames() const { return static_cast<int64_t>(regions_.size()); }
  /// Returns the regions in the order in which they open.
  const std::vector<PlanRegion>& regions() const { return regions_; }
  /// Returns the first stages of the items that move their saved tensors, in order.
  const std::vector<int64_t>& moved() const { return moved_; }
  /// Returns how often each stage's forward runs in one forward and backward with early stop: once,
  /// and once more for each enclosing region whose recompute reaches the stage.
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
  int64_t max_depth = 0;    ///< largest depth of nested regions; 0: no limit
  bool early_stop = true;   ///< as in the `CheckpointOptions` that the plan will run with
  double frame_cost_s = 0;  ///< [seconds] once per region: bookkeeping, random state
  /// Share in [0, 1); 0: exact. Drops points of inner frontiers that are faster than the one before
  /// by less than this share. For every budget the time beyond one forward is then at most 1 / (1 -
  /// eps)^(stages - 1) times the least one, and usually within eps of it. The first and the last
  /// point are exact.
  double eps = 0;
};

/// One point of a frontier: a peak, and the least time for it.
struct FrontierPoint {
  int64_t bytes = 0;   ///< [bytes] the peak beyond the input
  double extra_s = 0;  ///< [seconds] of recomputes, beyond one forward and one backward
};

/// The error for a budget that no plan fits.
class REMAT_API InfeasibleBudget : public c10::ValueError {
 public:
  /// Makes an error with this text.
  InfeasibleBudget(std::string message, int64_t minimum_bytes);
  /// Returns the smallest budget [bytes] for which there is a plan.
  int64_t minimum_bytes() const { return minimum_bytes_; }

 private:
  int64_t minimum_bytes_;
};

/// The result of `solve`: the least time for every budget. Copies share the solver's tables, from
/// which `plan` reads plans. Any thread.
class REMAT_API Frontier {
 public:
  /// Returns the points: bytes rise and seconds fall strictly from point to point, and the last one
  /// recomputes nothing.
  const std::vector<FrontierPoint>& points() const { return points_; }
  /// Returns the fastest plan whose peak is at most `budget_bytes` beyond the input; of equally
  /// fast plans, one with the smallest peak. Throws `InfeasibleBudget` below the first point.
  Plan plan(int64_t budget_bytes) const;

 private:
  explicit Frontier(std::shared_ptr<const detail::FrontierTable> table);
  friend Frontier solve(const ChainCost& cost, const SolveOptions& options);

  std::shared_ptr<const detail::FrontierTable> table_;
  std::vector<FrontierPoint> points_;
};

/// Returns the exact frontier of time and memory over all plans whose last stage is in no region,
/// for every budget at once. It uses the recurrence of rotor (Beaumont et al. 2019, "Optimal
/// checkpointing for heterogeneous chains") on staircases instead of memory slots, with early stop,
/// the depth limit and the cost of a frame.
///
/// A region around the last stage would be recomputed at once. It would help only if that stage's
/// saved tensors and forward temporaries together exceed all later memory: split such a stage in
/// two.
///
/// With `ChainCost::moving`, saved tensors of stages outside of regions and inputs of outermost
/// regions may move. The model has whole values and one channel. The copies of one item (a stage or
/// a region) run beside the next item. The next item's forward ends when the tensors have been
/// written; they are read back from the beginning of its backward. During both copies the bytes are
/// in memory. The program waits for copies that take longer than that forward, or than that
/// backward with its first recompute. The search is exact in this model.
///
/// Cost: cubic in the number of different stages times the number of points; chains of equal stages
/// are much cheaper. Measured: bench/RESULTS.md. The points take 16 bytes each while the `Frontier`
/// lives.
/// Throws `c10::ValueError` for costs or options out of range, and for bytes whose sum exceeds an
/// int64_t.
REMAT_API Frontier solve(const ChainCost& cost, const SolveOptions& options = {});

/// The result of `simulate` for a plan.
struct Simulation {
  int64_t peak_bytes = 0;        ///< [bytes] beyond the input
  double extra_s = 0;            ///< [seconds] beyond one forward and one backward
  std::vector<int64_t> calls{};  ///< how often each stage's forward runs
  int64_t frames = 0;            ///< regions
  int64_t depth = 0;             ///< the deepest nesting
};

/// Returns the cost of a plan. Applies the rules of regions to sizes, event by event, independently
/// of the solver's recurrence.
/// Uses `early_stop` and `frame_cost_s` of the options. Time: linear in the number of stage calls.
/// Throws `c10::ValueError` as `solve`, and if plan and cost have different numbers of
/// stages.
REMAT_API Simulation simulate(const ChainCost& cost, const Plan& plan,
                              const SolveOptions& options = {});

/// Options of `measure`: how it runs each stage.
struct MeasureOptions {
  int64_t warmup = 1;   ///< runs that are not timed
  int64_t repeats = 5;  ///< timed runs; the fastest counts
  /// Device whose bytes and time are measured; empty: the sample's device.
  std::optional<c10::Device> device{};
  bool early_stop = true;  ///< early stop of the regions in which a stage is measured
  /// Place to which `measure` tries to move saved tensors and outputs of stages; empty: plans move
  /// no tensors.
  std::optional<MoveOptions> moving{};
};

/// Runs each stage forward and backward and returns the costs. The first stage gets `sample`, each
/// later one the output of the stage before. Grad mode is on; `sample` takes part in backward if it
/// requires grad.
///
/// Bytes are those of storages, so a view counts with its whole storage. Saved tensors whose
/// storage outlives the stage's graph (parameters, constants) do not count. If the program uses
/// autocast, call `measure` under the same autocast. Casts in its cache are then counted separately
/// (`cached_cast_bytes`), and the cache is emptied. Temporaries are measured at the device's
/// allocator (`MemoryMeter`) and include other threads: measure while no other thread allocates
/// there.
/// Times on the CPU are those of the calling thread. On an accelerator they lie between events on
/// the current stream, and each run is waited for alone. A stage whose operators are queued more
/// slowly than they run therefore costs the time of the queueing. Parameters have gradients
/// throughout, as in training that sets them to zero. A program that drops them
/// (`zero_grad(set_to_none=true)`) needs their bytes in addition.
///
/// Hooks of parameters do not run, so no optimizer steps. Inside a region, stages run as if the
/// region were absent. Afterwards parameters have their old `.grad` and hooks, and the default
/// generators of the CPU and of the device their old states. Other side effects of running a stage
/// remain: buffers, members of modules, its own generators. If they matter, measure the stages of a
/// copy of the module (`module->clone()`).
/// Throws the exceptions of stages. Throws `c10::ValueError` for no stages or repeats, an undefined
/// sample, a stage that writes to its input in place (no region could begin with it), or a stage
/// that returns an undefined tensor. Throws `CheckpointError` (`Unsupported`) if the device's
/// allocator does not report its bytes.
REMAT_API ChainCost measure(const std::vector<Stage>& stages, const at::Tensor& sample,
                            const MeasureOptions& options = {});

/// Returns the budget [bytes] for a plan of `cost` in the present free memory of `device`
/// (`free_bytes`). Subtracts `margin`, a share in [0, 1) for pieces of memory that are too small to
/// use, and the measured rounding. Memory for the chain's input, parameters and gradients must be
/// allocated already.
/// Throws as `free_bytes`; `c10::ValueError` for a margin or a rounding out of range.
/// Example: examples/budget.cpp.
REMAT_API int64_t free_budget(const ChainCost& cost, c10::Device device, double margin = 0.05);

/// Runs the stages on `input` with nested `checkpoint()` calls as the plan says, all with
/// `options`. Each region's name gets the numbers of its stages. Tensors that the plan moves go to
/// the place that `moving` names (common rules: hooks.h, above SaveOnCpuGuard). Tensors that cannot
/// be written stay in memory, with a warning. The stages are copied once, and kept as long as the
/// graph.
/// Memory: at most the peak that `simulate` returns for measured costs. That peak includes the loss
/// and its gradient, which the caller of `backward()` holds to its end.
/// Throws `c10::ValueError` if plan and stages have different numbers. For a plan that moves
/// tensors, also if `moving` has no directory and the input is on the CPU, or if no file can be
/// made in the directory. Other errors are those of `checkpoint()`.
/// Example: examples/budget.cpp.
REMAT_API at::Tensor run(const Plan& plan, const std::vector<Stage>& stages, at::Tensor input,
                         const CheckpointOptions& options = {}, const MoveOptions& moving = {});

// Plans by formula, for chains without measurements. All functions throw `c10::ValueError` if
// `stages` is below 1 or the second number is out of its range.

/// Returns the plan with the fewest stage calls for equal stages, if `snapshots` >= 1 states are
/// stored, including the input (Griewank and Walther 2000, "Algorithm 799: revolve"). At most
/// snapshots + 2 outputs of stages, including the input, are alive at once.
REMAT_API Plan revolve_plan(int64_t stages, int64_t snapshots);
/// Returns the plan with the fewest stage calls for equal stages, if each of `units` >= 1 holds a
/// state or the saved tensors of one stage (Maddison 2024, "Step-based checkpointing with
/// high-level algorithmic differentiation"). Time: O(stages^2 units) at worst.
REMAT_API Plan mixed_plan(int64_t stages, int64_t units);
/// Returns a plan of `segments` runs of stages whose lengths differ by at most one, longer ones
/// first. All runs but the last are regions. 9 stages in 5 segments: 2, 2, 2, 2, 1.
REMAT_API Plan balanced_plan(int64_t stages, int64_t segments);
/// Returns the plan of `torch.utils.checkpoint.checkpoint_sequential`: each segment has stages /
/// segments stages; the last one is longer and is no region. 9 stages in 5 segments: 1, 1, 1, 1, 5.
REMAT_API Plan torch_sequential_plan(int64_t stages, int64_t segments);
/// Returns the plan whose left half is a region and whose right half is not; each half is divided
/// in the same way. Depth: log2 of the stages.
REMAT_API Plan halving_plan(int64_t stages);

}  // namespace remat
