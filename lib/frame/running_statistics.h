#pragma once
// Warns of a batch norm whose running statistics a recompute would move once more.

#include <c10/core/StorageImpl.h>

#include <vector>

#include "lib/frame/region.h"
#include "lib/state/surroundings.h"

namespace remat {

/// Warns, once for each region name, that recomputes will move running statistics again, unless
/// these are restored in recomputes or the region ignores buffers. `statistics`: buffers that a
/// batch norm in training mode saved in the region; a null entry stands for an instance norm that
/// moves some. Call it when the region's function has returned.
void warn_of_running_statistics(const Region& region, const Surroundings& surroundings,
                                const std::vector<const c10::StorageImpl*>& statistics);

}  // namespace remat
