#pragma once
// One call for a chain and a byte budget: measures, plans, runs as planned, and says what it chose.

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

/// How `fit` measures and plans.
struct FitOptions {
  CheckpointOptions checkpoint{.location = {}};  ///< of all regions of the plan
  MeasureOptions measure{};                      ///< of each stage
  int64_t max_depth = 0;                         ///< of nesting; 0: any
  double frame_cost_s = 0;                       ///< of one region [seconds]
  /// Runs a step as planned and looks at its peak, which may be higher than the stages' costs say:
  /// where stages share parameters, have buffers that are restored, or the program keeps what they
  /// return. Above the budget, a smaller plan is taken.
  bool verify = true;
  /// A file that measurements are read from, and added to. One that does not exist is made. Empty:
  /// none.
  std::filesystem::path measurements{};
};

/// A chain that runs as planned for a byte budget. Copies share the plans.
///
/// It was fitted to a sample; for an input of another shape, dtype or device, or with another
/// `requires_grad`, it measures and plans anew, once each, when it is called, in a region, too.
/// Threads: any; one at a time plans, and holds no lock while stages run. What other threads
/// allocate meanwhile is in what is measured: where several run it, call it first with each kind of
/// input on one.
class REMAT_API Fitted {
 public:
  /// Runs the stages with the regions of the plan. Throws what `run` throws, and what `fit` throws
  /// where it has to fit anew; `CheckpointError` (`Unsupported`) where a stage calls it with the
  /// kind of input that is being measured.
  at::Tensor operator()(at::Tensor input) const;

  int64_t budget_bytes() const;  ///< as asked for
  // Of the sample that was fitted last:
  Plan plan() const;             ///< what was chosen
  ChainCost cost() const;        ///< as measured, or as the file had it
  bool was_measured() const;     ///< not: the file had it
  Frontier frontier() const;     ///< the least time for every budget
  Simulation predicted() const;  ///< of the plan
  /// The peak [bytes] of a step as planned, beyond input, parameters and their gradients; none
  /// without `verify`.
  std::optional<int64_t> measured_peak() const;
  /// Returns a table of the chosen plan beside no regions, a region a stage and the least memory,
  /// and of each stage.
  std::string table() const;
  /// The frontier of memory and time with the plan on it, as SVG.
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
///     model(batch).backward();  // the last stage is the loss, as a rule
///
/// Measuring runs each stage several times (see `measure`, also for what is put back afterwards).
/// Stages are copied.
/// Throws `InfeasibleBudget` below the smallest plan's peak; what `measure` throws;
/// `c10::ValueError` for a file of measurements that cannot be read or written, or is none. Source:
/// `measure`, `solve`, `run`.
REMAT_API Fitted fit(std::vector<Stage> stages, const at::Tensor& sample, int64_t budget_bytes,
                     FitOptions options = {});

/// Returns the peak [bytes] of a forward and backward of a whole chain, beyond what there is
/// before, the input and gradients of leaves: what `FitOptions::verify` looks at. Of `options`
/// only `device` counts. Puts back what `measure` puts back; throws what the chain throws.
REMAT_API int64_t measure_peak(const Stage& chain, const at::Tensor& sample,
                               const MeasureOptions& options = {});

}  // namespace remat
