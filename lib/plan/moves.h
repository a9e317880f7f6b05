#pragma once
// Where it waits what a plan moves, and how long copies take.

#include <c10/core/Device.h>

#include <memory>

#include "remat/place.h"
#include "remat/plan.h"

namespace remat {

/// For tensors of that device. Throws `c10::ValueError`, which begins with `user`, for options that
/// have no place for them.
std::shared_ptr<Place> place_of(const MoveOptions& options, c10::Device device, const char* user);

/// Of copies of so many bytes, with nothing beside them: the least of some.
MoveCost measure_copies(Place& place, c10::Device device, int64_t bytes, int64_t repeats);

}  // namespace remat
