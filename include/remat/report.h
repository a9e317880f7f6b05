#pragma once
// Seeing what happens: process-wide counts.

#include <cstdint>

#include "remat/export.h"

namespace remat {

/// Exact counts since the process started, except the two that say "now".
struct Counters {
  int64_t frames_created = 0;          ///< runs of `checkpoint()` with grad mode on
  int64_t frames_alive = 0;            ///< now: frames that some graph refers to
  int64_t recomputes = 0;              ///< begun, also those that failed
  int64_t early_stops = 0;             ///< recomputes that were cut short (Rule 5)
  int64_t tensors_dropped = 0;         ///< saved tensors that became slots
  int64_t tensors_recomputed = 0;      ///< slots filled by recomputes
  int64_t recomputed_bytes_alive = 0;  ///< now: [bytes] of recomputed tensors not yet handed over
};

/// Always on, any thread; each member is exact, taken one after the other.
REMAT_API Counters counters();

}  // namespace remat
