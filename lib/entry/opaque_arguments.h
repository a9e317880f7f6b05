#pragma once
// Finds structs among a region's arguments that hold tensors unknown to the region, and warns about
// them.

#include "remat/binding.h"

namespace remat {

/// Warns, once per region name, about an argument without `visit_tensors` that holds a tensor which
/// the region saved and the enclosing region on this thread made. Call it when the region has
/// ended.
void warn_of_opaque_arguments(Frame& frame, void (*visit_opaque)(const RegionBody&, OpaqueVisitor));

}  // namespace remat
