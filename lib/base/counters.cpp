#include "lib/base/counters.h"

#include "remat/counters.h"

namespace remat {

Counters counters() {
  const auto now = [](const std::atomic<int64_t>& counter) {
    return counter.load(std::memory_order_relaxed);
  };
  // Read first, so that no ended frame is counted before its begin.
  const int64_t frames_ended = now(live_counters.frames_ended);
  const int64_t frames_created = now(live_counters.frames_created);
  return {.frames_created = frames_created,
          .frames_alive = frames_created - frames_ended,
          .recomputes = now(live_counters.recomputes),
          .early_stops = now(live_counters.early_stops),
          .tensors_dropped = now(live_counters.tensors_dropped),
          .tensors_recomputed = now(live_counters.tensors_recomputed),
          .recomputed_bytes_alive = now(live_counters.recomputed_bytes_alive)};
}

}  // namespace remat
