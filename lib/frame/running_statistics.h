#pragma once
// Warns of a batch norm whose statistics a recompute would move once more.

#include <c10/core/StorageImpl.h>

#include <vector>

#include "lib/frame/region.h"
#include "lib/state/surroundings.h"

namespace remat {

/// The region's function has returned, and a batch norm in training saved these buffers in it;
/// null: an instance norm that moves some. Warns once a name, unless they are restored in
/// recomputes, or the region is told to let them be.
void warn_of_running_statistics(const Region& region, const Surroundings& surroundings,
                                const std::vector<const c10::StorageImpl*>& statistics);

}  // namespace remat
