#include "lib/plan/moves.h"

#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

#include "hooks/disk/save_in_tiers.h"
#include "lib/plan/stage_clock.h"

namespace remat {

std::shared_ptr<Place> place_of(const MoveOptions& options, c10::Device device, const char* user) {
  TORCH_CHECK_VALUE(options.min_bytes >= 0, user, ": MoveOptions::min_bytes is ", options.min_bytes,
                    ".\nHint: give 0 or more.");
  TORCH_CHECK_VALUE(!device.is_cpu() || !options.directory.empty(), user,
                    ": the plan moves tensors of the CPU, but MoveOptions has no directory.\n"
                    "Hint: set a directory for the file that holds them.");
  SaveInTiersOptions tiers;
  tiers.directory = options.directory;
  if (!options.directory.empty()) tiers.host_bytes = 0;
  tiers.pin_memory = options.pin_memory;
  return std::make_shared<SaveInTiers>(tiers, std::make_shared<TierTotals>());
}

MoveCost measure_copies(Place& place, c10::Device device, int64_t bytes, int64_t repeats) {
  MoveCost least{.store_s_per_byte = std::numeric_limits<double>::infinity(),
                 .load_s_per_byte = std::numeric_limits<double>::infinity()};
  const StageClock clock(device);
  const auto per_byte = [&](const StageClock::Moment& start) {
    return clock.seconds_between(start, clock.now()) / static_cast<double>(bytes);
  };
  // The first copy does not count: it makes the file longer, and buffers.
  for (int64_t i = 0; i <= repeats; ++i) {
    at::Tensor flat = at::ones({bytes}, at::TensorOptions(at::kByte).device(device));
    const auto start = clock.now();
    const auto contents = place.begin_store(flat);
    flat.reset();
    contents->finish_store();
    const double store = per_byte(start);
    const auto back = clock.now();
    contents->begin_load();
    flat = contents->finish_load();
    const double load = per_byte(back);
    if (i == 0) continue;
    least.store_s_per_byte = std::min(least.store_s_per_byte, store);
    least.load_s_per_byte = std::min(least.load_s_per_byte, load);
  }
  return least;
}

}  // namespace remat
