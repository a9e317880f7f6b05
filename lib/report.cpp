// Bodies of report.h: the counters.

#include "remat/report.h"

#include "lib/counters.h"

namespace remat {

LiveCounters live_counters;

Counters counters() {
  const auto now = [](const std::atomic<int64_t>& counter) {
    return counter.load(std::memory_order_relaxed);
  };
  return {.frames_created = now(live_counters.frames_created),
          .frames_alive = now(live_counters.frames_alive),
          .recomputes = now(live_counters.recomputes),
          .early_stops = now(live_counters.early_stops),
          .tensors_dropped = now(live_counters.tensors_dropped),
          .tensors_recomputed = now(live_counters.tensors_recomputed),
          .recomputed_bytes_alive = now(live_counters.recomputed_bytes_alive)};
}

}  // namespace remat
