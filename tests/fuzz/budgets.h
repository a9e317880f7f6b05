#pragma once
// Programs without regions, plainly and under byte budgets.

#include <optional>

#include "tests/fuzz/run.h"

namespace fuzz {

/// Runs the program plainly, and under six budgets, and says whether all agree.
std::optional<Finding> check_budgets(const Program& program);

}  // namespace fuzz
