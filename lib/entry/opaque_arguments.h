#pragma once
// Finds structs among a region's arguments that hold tensors unseen, and warns of them.

#include "remat/binding.h"

namespace remat {

/// The region has ended: warns, once for each name, of an argument without `visit_tensors` that
/// holds a tensor which the region saved, and which the region around, on this thread, made.
void warn_of_opaque_arguments(Frame& frame, void (*visit_opaque)(const RegionBody&, OpaqueVisitor));

}  // namespace remat
