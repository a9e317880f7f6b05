#pragma once
// A frontier of memory and time as SVG.

#include <cstdint>
#include <string>

#include "remat/plan.h"

namespace remat {

/// Returns the frontier as SVG, with the budget and the chosen plan marked. `step_s`: the time of a
/// step that recomputes nothing. `chosen`: the simulation of the chosen plan.
std::string frontier_picture(const Frontier& frontier, double step_s, int64_t budget_bytes,
                             const Simulation& chosen);

}  // namespace remat
