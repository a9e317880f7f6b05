#pragma once
// One call for a chain and a byte budget: measures, plans, runs as planned, and reports the chosen
// plan.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "remat/export.h"
#include "remat/options.h"
#include "remat/plan.h"

namespace remat {

/// Options of `fit`: how it measures and plans.
struct FitOptions {
  CheckpointOptions checkpoint{.location = {}};  ///< of all regions of the plan
  MeasureOptions measure{};                      ///< of each stage
  int64_t max_depth = 0;                         ///< largest depth of nested regions; 0: no limit
  double frame_cost_s = 0;                       ///< [seconds] cost of one region
  /// Runs a step as planned and checks its peak. The peak may be higher than the stages' costs
  /// predict: if stages share parameters, have buffers that are restored, or the program keeps
  /// their results. If the peak exceeds the budget, a smaller plan is taken.
  bool verify = true;
  /// A file from which measurements are read, and to which they are added. A missing file is
  /// created. Empty: no file.
  std::filesystem::path measurements{};
};

/// A chain that runs as planned for a byte budget. Copies share the plans.
///
/// It was fitted to a sample. A call with an input of another shape, dtype, device or
/// `requires_grad` measures and plans anew, once for each kind, also inside a region.
/// Threads: any. One thread at a time plans; it holds no lock while stages run. Measurements
/// include allocations of other threads. If several threads run the chain, first call it on one
/// thread with each kind of input.
class REMAT_API Fitted {
 public:
  /// Runs the stages with the regions of the plan. Throws the errors of `run`, and those of `fit`
  /// if it measures anew; `CheckpointError` (`Unsupported`) if a stage calls it with the kind of
  /// input that is being measured.
  at::Tensor operator()(at::Tensor input) const;

  int64_t budget_bytes() const;  ///< as asked for
  // These describe the sample that was fitted last.
  Plan plan() const;             ///< the chosen plan
  ChainCost cost() const;        ///< as measured, or as read from the file
  bool was_measured() const;     ///< false: the cost came from the file
  Frontier frontier() const;     ///< the least time for every budget
  Simulation predicted() const;  ///< the simulation of the plan
  /// Returns the peak [bytes] of a step as planned, beyond input, parameters and their gradients;
  /// empty without `verify`.
  std::optional<int64_t> measured_peak() const;
  /// Returns a table that compares the chosen plan with no regions, one region per stage and the
  /// least memory, and lists each stage.
  std::string table() const;
  /// Returns the frontier of memory and time as SVG, with the plan marked on it.
  std::string picture() const;

 private:
  struct Impl;
  explicit Fitted(std::shared_ptr<Impl> impl);
  friend Fitted fit(std::vector<Stage> stages, const at::Tensor& sample, int64_t budget_bytes,
                    FitOptions options);
  std::shared_ptr<Impl> impl_;
};

/// Measures the stages on `sample`, finds the fastest plan whose peak is at most `budget_bytes`
/// beyond the input, parameters and their gradients, and returns the chain as planned.
///
///     const remat::Fitted model = remat::fit(stages, batch, 64 << 20);
///     std::cout << model.table();
///     model(batch).backward();  // the last stage is usually the loss
///
/// Measuring runs each stage several times; `measure` says which state is restored afterwards.
/// Stages are copied.
/// Throws `InfeasibleBudget` for a budget below the smallest plan's peak; the errors of `measure`;
/// `c10::ValueError` for a file that cannot be read or written or holds no measurements.
/// Source: `measure`, `solve`, `run`.
REMAT_API Fitted fit(std::vector<Stage> stages, const at::Tensor& sample, int64_t budget_bytes,
                     FitOptions options = {});

/// Returns the peak [bytes] of a forward and backward of a whole chain, beyond the bytes alive
/// before, the input and gradients of leaves. `FitOptions::verify` checks this peak. Uses only
/// `device` of `options`. Restores the state that `measure` restores; throws the errors of the
/// chain.
REMAT_API int64_t measure_peak(const Stage& chain, const at::Tensor& sample,
                               const MeasureOptions& options = {});

}  // namespace remat
