#pragma once
// The process-wide counts behind `remat::counters()`.

#include <atomic>
#include <cstdint>

namespace remat {

struct LiveCounters {
  std::atomic<int64_t> frames_created{0}, frames_ended{0}, recomputes{0}, early_stops{0};
  std::atomic<int64_t> tensors_dropped{0}, tensors_recomputed{0}, recomputed_bytes_alive{0};
  std::atomic<int64_t> offloads{0}, offload_fallbacks{0};
};

inline constinit LiveCounters live_counters;

inline void count(std::atomic<int64_t>& counter, int64_t by = 1) {
  counter.fetch_add(by, std::memory_order_relaxed);
}

}  // namespace remat
