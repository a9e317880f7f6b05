#pragma once
// A frontier of memory and time as SVG.

#include <cstdint>
#include <string>

#include "remat/plan.h"

namespace remat {

/// `step_s`: of a step that recomputes nothing. `chosen`: the plan on it.
std::string frontier_picture(const Frontier& frontier, double step_s, int64_t budget_bytes,
                             const Simulation& chosen);

}  // namespace remat
