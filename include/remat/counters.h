#pragma once
// Process-wide counts of regions and recomputes.

#include <cstdint>

#include "remat/export.h"

namespace remat {

/// Exact counts since the process started; the two marked "now" are present values.
struct Counters {
  int64_t frames_created = 0;          ///< runs of `checkpoint()` with grad mode on
  int64_t frames_alive = 0;            ///< now: frames to which a graph refers
  int64_t recomputes = 0;              ///< begun, also those that failed
  int64_t early_stops = 0;             ///< recomputes that early stop ended
  int64_t tensors_dropped = 0;         ///< saved tensors that became slots
  int64_t tensors_recomputed = 0;      ///< slots filled by recomputes
  int64_t recomputed_bytes_alive = 0;  ///< now: [bytes] of recomputed tensors not yet handed over
};

/// Returns the counts, which are always on. Each member is exact; they are read one after the
/// other. Any thread.
REMAT_API Counters counters();

}  // namespace remat
