#pragma once
// Saved tensors that wait elsewhere: the depot of the inputs of regions.

#include <memory>

#include "hooks/depot.h"

namespace remat {

/// The process has one depot for what `CheckpointOptions::offload_inputs` moves to the CPU. A
/// changed input raises when it is read, as if it had stayed.
const std::shared_ptr<Depot>& depot_of_inputs();

}  // namespace remat
