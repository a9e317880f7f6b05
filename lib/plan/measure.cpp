// Measures the costs of a chain: each stage runs forward and backward on its own.

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "lib/plan/generator_scopes.h"
#include "lib/plan/moves.h"
#include "lib/plan/one_stage.h"
#include "lib/plan/trial.h"
#include "lib/rng/draws.h"
#include "remat/binding.h"
#include "remat/fit.h"
#include "remat/memory.h"
#include "remat/plan.h"

namespace remat {

namespace {

/// Sets the bytes at the first read for a stage whose backward reads nothing. The recompute of its
/// region then runs in the backward of the stage before, beside the memory made by then.
void recompute_before(const StageCost& before, StageCost& stage) {
  stage.first_read_tmp_bytes =
      at_least_none(before.grad_bytes + before.first_read_tmp_bytes - stage.grad_bytes);
}

ChainCost measure_all(const std::vector<Stage>& stages, const at::Tensor& sample,
                      const MeasureOptions& options, const StageRegion* run_region) {
  TORCH_CHECK_VALUE(!stages.empty(), "remat::measure: no stages were passed.");
  TORCH_CHECK_VALUE(sample.defined(), "remat::measure: the sample is an undefined tensor.");
  TORCH_CHECK_VALUE(options.warmup >= 0,
                    "remat::measure: MeasureOptions::warmup must be at least 0, got ",
                    options.warmup, ".");
  TORCH_CHECK_VALUE(options.repeats >= 1,
                    "remat::measure: MeasureOptions::repeats must be at least 1, got ",
                    options.repeats, ".");
  const OutsideRegions outside;
  const UndoneDraws undone;
  const at::AutoGradMode grad_mode(true);
  const c10::Device device = MemoryMeter(options.device.value_or(sample.device())).device();
  const DeviceGeneratorScope device_generator(device);
  Measured measured{.device = device, .run_region = run_region};
  if (options.moving) measured.place = place_of(*options.moving, device, "remat::measure");
  at::Tensor input = input_from(sample, sample.requires_grad());
  ChainCost cost{.input_bytes = storage_bytes(input, device),
                 .input_grad_bytes = gradient_bytes(input, device)};
  std::unique_ptr<Trial> mover;  // the stage that can move most
  StageCost most_moved;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    TORCH_CHECK_VALUE(stages[i], "remat::measure: the function of stage ", i + 1, " is empty.");
    auto trial = std::make_unique<Trial>(stages[i], std::move(input), i + 1, measured);
    cost.stages.push_back(trial->cost(options, i + 1 == stages.size()));
    if (!trial->moves_input() && i > 0) cost.stages[i - 1].has_movable_output = false;
    if (!trial->reads() && i > 0) recompute_before(cost.stages[i - 1], cost.stages[i]);
    input = trial->output();
    if (cost.stages[i].movable_bytes <= most_moved.movable_bytes) continue;
    most_moved = cost.stages[i];
    mover = std::move(trial);
  }
  at::autocast::clear_cache();
  cost.rounding = measured.rounding();
  cost.cached_cast_bytes = measured.cached_cast_bytes;
  cost.held_to_end_bytes = cost.stages.back().output_bytes + cost.stages.back().grad_bytes;
  const bool has_movable_output =
      std::any_of(cost.stages.begin(), cost.stages.end(),
                  [](const StageCost& each) { return each.has_movable_output; });
  if (mover == nullptr && !has_movable_output) return cost;
  constexpr int64_t least_bytes = 1 << 20;
  cost.moving = measure_copies(*measured.place, device,
                               std::max(least_bytes, most_moved.movable_bytes), options.repeats);
  cost.moving->held_up_share =
      mover == nullptr ? 1 : mover->held_up_share(most_moved, *cost.moving, options);
  return cost;
}

}  // namespace

ChainCost measure(const std::vector<Stage>& stages, const at::Tensor& sample,
                  const MeasureOptions& options) {
  return measure_all(stages, sample, options, nullptr);
}

ChainCost measure_stages(const std::vector<Stage>& stages, const at::Tensor& sample,
                         const MeasureOptions& options, const StageRegion& run_region) {
  return measure_all(stages, sample, options, &run_region);
}

int64_t measure_peak(const Stage& chain, const at::Tensor& sample, const MeasureOptions& options) {
  const OutsideRegions outside;
  const UndoneDraws undone;
  const at::AutoGradMode grad_mode(true);
  MemoryMeter meter(options.device.value_or(sample.device()));
  const c10::Device device = meter.device();
  const DeviceGeneratorScope device_generator(device);
  const at::Tensor input = input_from(sample, sample.requires_grad());
  at::autocast::clear_cache();  // the step makes its own casts
  wait_for_engine(device);
  const int64_t before = meter.live_bytes();
  meter.reset_peak();
  at::Tensor output = chain(input);
  const int64_t forward_peak = meter.peak_bytes() - before;
  if (!output.requires_grad()) return forward_peak;
  const int64_t live = meter.live_bytes();
  const GradientScope gradients(output);
  const int64_t gradients_bytes = meter.live_bytes() - live;
  meter.reset_peak();
  output.backward(at::ones_like(output));
  return std::max(forward_peak, meter.peak_bytes() - before - gradients_bytes);
}

}  // namespace remat
