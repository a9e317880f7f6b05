#pragma once
// The place of the tensors that a plan moves, and the time of copies.

#include <c10/core/Device.h>

#include <memory>

#include "remat/place.h"
#include "remat/plan.h"

namespace remat {

/// Returns the place for tensors of the device. Throws `c10::ValueError`, whose text begins with
/// `user`, for options without a place for them.
std::shared_ptr<Place> place_of(const MoveOptions& options, c10::Device device, const char* user);

/// Returns the shortest times of `repeats` copies of `bytes`, with no work beside them.
MoveCost measure_copies(Place& place, c10::Device device, int64_t bytes, int64_t repeats);

}  // namespace remat
