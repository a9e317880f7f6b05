// The part of a stage's saved tensors that can move, and the time of a stage beside copies.

#include <ATen/core/Tensor.h>

#include <limits>

#include "hooks/depot/depot.h"
#include "lib/move/depots.h"
#include "lib/plan/one_stage.h"
#include "lib/plan/trial.h"
#include "remat/memory.h"

namespace remat {

std::pair<int64_t, bool> Trial::held_after_forward(const std::shared_ptr<Depot>& depot) const {
  const c10::Device device = measured_.device;
  begin_run();
  const MemoryMeter meter(device);
  const int64_t before = meter.live_bytes();
  at::Tensor input = input_from(input_.clone(), input_.requires_grad());
  const auto storage = input.storage().getWeakStorageImpl();
  at::Tensor output;
  {
    std::optional<DepotGuard> guard;
    if (depot != nullptr) guard.emplace(depot);
    output = stage_(std::move(input));
  }
  if (depot != nullptr) depot->finish_stores();
  return {meter.live_bytes() - before, !storage.expired()};
}

void Trial::measure_moves(StageCost& cost, const MeasureOptions& options) {
  const auto depot = depot_of_moves(measured_.place, options.moving->min_bytes, {});
  cost.has_movable_output = requires_grad_ && depot->moves(output());
  if (!input_.has_storage()) return;
  const auto [bytes, has_input] = held_after_forward(nullptr);
  const auto [bytes_left, has_input_left] = held_after_forward(depot);
  moves_input_ = !has_input || !has_input_left;
  const int64_t of_input =
      has_input && !has_input_left ? storage_bytes(input_, measured_.device) : 0;
  cost.movable_bytes = std::clamp<int64_t>(bytes - bytes_left - of_input, 0, cost.saved_bytes);
}

double Trial::held_up_share(const StageCost& cost, const MoveCost& copies,
                            const MeasureOptions& options) {
  const auto bytes = static_cast<double>(cost.movable_bytes);
  const double store_s = copies.store_s_per_byte * bytes, load_s = copies.load_s_per_byte * bytes;
  if (!(store_s + load_s > 0)) return 1;
  double staying_s = std::numeric_limits<double>::infinity(), moving_s = staying_s;
  constexpr int64_t times_repeats = 3;  // one stage stands for all, and the difference is small
  for (int64_t i = 0; i < times_repeats * options.repeats; ++i) {
    staying_s = std::min(staying_s, seconds_of_two(nullptr));
    const auto depot = depot_of_moves(measured_.place, options.moving->min_bytes, {});
    moving_s = std::min(moving_s, seconds_of_two(depot));
  }
  const double waiting_s =
      std::max(0.0, store_s - cost.forward_s) + std::max(0.0, load_s - cost.backward_s);
  // No move is free: a smaller share is noise, which a search would exploit.
  constexpr double least_share = 0.1;
  return std::max(least_share, (moving_s - staying_s - waiting_s) / (store_s + load_s));
}

// Note [Times of moves]
// Copies are timed alone, with as many bytes as the stage that can move most. Stages beside copies
// are slower: they prepare the copies, and share memory and cores with them. This share is measured
// with a stage that runs twice, so that copies of the first run are beside the second, in forward
// and backward. It is the time that moving adds, without the time spent waiting for copies.
double Trial::seconds_of_two(const std::shared_ptr<Depot>& depot) const {
  const StageClock& clock = measured_.clock;
  const auto start = clock.now();
  at::Tensor first;
  {
    std::optional<DepotGuard> guard;
    if (depot != nullptr) guard.emplace(depot);
    first = forward(input_);
  }
  at::Tensor second = forward(input_);
  if (depot != nullptr) {
    depot->finish_stores();
    second.register_hook([depot](const at::Tensor&) { depot->begin_loads(); });
  }
  backward(second);
  second.reset();
  backward(first);
  return clock.seconds_between(start, clock.now());
}

}  // namespace remat
