#pragma once
// Runs a frame's function again: fills slots, stops early, fails cleanly.

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>

#include "lib/frame/frame.h"

namespace remat {

/// Recomputes every slot that is alive into `values`, or `only_position` alone if it is not
/// negative. On return the slots are filled and compared. If it throws, only the earlier contents
/// of `values` remain. No lock may be held.
void recompute(const c10::intrusive_ptr<Frame>& frame, RecomputedValues& values,
               int64_t only_position = -1);

/// Recomputes into the values of a task, for which its other threads wait (Rule 7). Returns the
/// value of a slot; nothing for a negative position: the recompute is one ahead.
Value recompute_for(const c10::intrusive_ptr<Frame>& frame, const Task& task,
                    const std::shared_ptr<RecomputedValues>& values, int64_t position);

}  // namespace remat
