#pragma once
// Runs a frame's function again: fills slots, stops early, fails cleanly.

#include <c10/util/intrusive_ptr.h>

#include <cstdint>

#include "lib/frame/frame.h"

namespace remat {

/// Recomputes into `values`: every slot that is alive, or `only_position` alone if it is not
/// negative. On return the slots are filled and compared; otherwise it throws, with nothing left
/// behind but what `values` already held. No lock is held.
void recompute(const c10::intrusive_ptr<Frame>& frame, RecomputedValues& values,
               int64_t only_position = -1);

}  // namespace remat
