#pragma once
// Warns of a batch norm whose running statistics a recompute would move once more.

#include <c10/core/StorageImpl.h>

#include <vector>

#include "lib/frame/inputs.h"
#include "lib/frame/region.h"
#include "lib/state/surroundings.h"

namespace remat {

/// Reports the storages of running statistics that a batch norm in training mode saved in the
/// region; a null entry stands for an instance norm that moves some. Running statistics that are
/// arguments become an error in backward, in each region whose recompute would move them. For
/// others a warning is issued, once for each region name, unless they are restored in recomputes or
/// the region ignores buffers. Call it when the region's function has returned.
void saw_running_statistics(const Region& region, Inputs& inputs, const Surroundings& surroundings,
                            std::vector<const c10::StorageImpl*> statistics);

}  // namespace remat
