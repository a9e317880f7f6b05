// What a stage costs as a region whose policy keeps results.

#include <ATen/core/Tensor.h>

#include <limits>
#include <vector>

#include "hooks/depot.h"
#include "lib/plan/one_stage.h"
#include "lib/plan/trial.h"
#include "lib/scope/offload.h"
#include "lib/selective/policy_rule.h"
#include "remat/memory.h"

namespace remat {

at::Tensor Trial::forward_under(const Policy& policy, const MeasureOptions& options,
                                at::Tensor input) const {
  return forward_in({.early_stop = options.early_stop, .policy = policy, .location = {}},
                    std::move(input));
}

// Note [Regions as measured]
// What a region with a policy costs is measured as a whole, beside the stage without a region: what it
// holds between forward and backward, and the peak of all that follows. How a replay hands out
// what was kept, what else a recompute makes meanwhile and when that dies cannot be added up from parts.
void Trial::measure_policies(StageCost& cost, const MeasureOptions& options) {
  output_ = at::Tensor();
  std::vector<KeepingCost> all;
  std::vector<double> seconds(options.policies.size(), std::numeric_limits<double>::infinity());
  for (std::size_t i = 0; i < options.policies.size(); ++i) {
    backward(forward_under(options.policies[i], options));
    all.push_back(keeping_bytes(options.policies[i], options, cost));
    all.back().policy = static_cast<int64_t>(i) + 1;
  }
  // In turns, as the difference counts.
  const StageClock& clock = measured_.clock;
  const auto seconds_of = [&](const auto& run_forward) {
    const auto start = clock.now();
    backward(run_forward());
    return clock.seconds_between(start, clock.now());
  };
  double plain_s = std::numeric_limits<double>::infinity();
  for (int64_t repeat = 0; repeat < (all.empty() ? 0 : options.repeats); ++repeat) {
    plain_s = std::min(plain_s, seconds_of([&] { return forward(); }));
    for (std::size_t i = 0; i < all.size(); ++i)
      seconds[i] = std::min(
          seconds[i], seconds_of([&] { return forward_under(options.policies[i], options); }));
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    // No region is free, and a difference of less is noise, which a search for the fastest plan would find.
    constexpr double least_share = 0.01;
    all[i].extra_s = std::max(least_share * plain_s, seconds[i] - plain_s);
    const bool is_useful = all[i].kept_bytes > 0 && all[i].kept_bytes < cost.saved_bytes;
    if (is_useful) cost.keeping.push_back(all[i]);
  }
  output_ = forward().detach();
}

KeepingCost Trial::keeping_bytes(const Policy& policy, const MeasureOptions& options,
                                 const StageCost& cost) const {
  KeepingCost keeping;
  const int64_t peak = run_keeping(policy, options, cost, input_, keeping);
  // See Note [Inputs as in a chain].
  if (std::optional<at::Tensor> lone = lone_input()) {
    const int64_t bytes = storage_bytes(*lone, measured_.device);
    const int64_t lone_peak =
        bytes + run_keeping(policy, options, cost, *std::exchange(lone, {}), keeping);
    keeping.lone_backward_bytes = std::max(keeping.kept_bytes, lone_peak - cost.grad_bytes);
  }
  keeping.backward_bytes = std::max(keeping.kept_bytes, peak - cost.grad_bytes);
  keeping.movable_bytes = std::clamp<int64_t>(movable_kept(policy, options), 0, keeping.kept_bytes);
  return keeping;
}

int64_t Trial::run_keeping(const Policy& policy, const MeasureOptions& options,
                           const StageCost& cost, at::Tensor input, KeepingCost& keeping) const {
  const BackwardOfStage::Start start;
  begin_run();
  MemoryMeter meter(measured_.device);
  const int64_t before = meter.live_bytes() + cached_bytes_;
  at::Tensor output = forward_under(policy, options, std::move(input));
  keeping.kept_bytes = at_least_none(meter.live_bytes() - before - cost.output_bytes);
  keeping.forward_tmp_bytes =
      at_least_none(meter.peak_bytes() - before - cost.output_bytes - keeping.kept_bytes);
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
  if (output.has_storage()) storage = output.storage().getWeakStorageImpl();
  const BackwardOfStage backward(output, start, /*is_last=*/false);
  output = at::Tensor();
  keeping.keeps_output = storage && !storage->expired();
  meter.reset_peak();
  backward.run();
  return meter.peak_bytes() - before;
}

int64_t Trial::movable_kept(const Policy& policy, const MeasureOptions& options) const {
  // A binding's regions send nothing through hooks on their own.
  if (measured_.place == nullptr || measured_.run_region != nullptr) return 0;
  const auto rule = PolicyRule::through_hooks(PolicyRule::of(policy));
  if (rule == nullptr) return 0;
  const auto held_by = [&](const Policy& under, const std::shared_ptr<Depot>& depot) {
    begin_run();
    const MemoryMeter meter(measured_.device);
    const int64_t before = meter.live_bytes();
    at::Tensor output;
    {
      std::optional<DepotGuard> guard;
      if (depot != nullptr) guard.emplace(depot, /*takes_kept_only=*/true);
      output = forward_under(under, options);
    }
    if (depot != nullptr) depot->finish_stores();
    return meter.live_bytes() - before;
  };
  return held_by(policy, nullptr) -
         held_by(PolicyRule::policy(rule),
                 depot_of_moves(measured_.place, options.moving->min_bytes, {}));
}

}  // namespace remat
