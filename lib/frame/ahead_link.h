#pragma once
// A region's place among the regions that a backward recomputes ahead.

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>

#include "lib/frame/task.h"
#include "lib/seam/engine.h"

namespace remat {

class RegionHandle;

/// The place of a region in the chain of its thread, see Note [Recomputing ahead]; and the handle
/// that waits for the region's end.
struct AheadLink {
  int64_t num_regions = 0;  ///< to prepare
  c10::weak_intrusive_ptr<TaskMember> before{c10::intrusive_ptr<TaskMember>()};
  seam::NodeMark node{};  ///< of the region's result
  std::shared_ptr<RegionHandle> handle{};
};

}  // namespace remat
