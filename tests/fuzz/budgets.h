#pragma once
// Programs without regions, plainly and under byte budgets.

#include <cstdint>
#include <optional>

#include "tests/fuzz/run.h"

namespace fuzz {

/// [bytes] The budget in which programs run on their threads; 0: none.
int64_t& budget_bytes();
/// Whether values may move within it: to the CPU, or into a file.
bool& budget_moves();

/// Runs the program under a budget without a limit, and under six others, and says whether all
/// agree.
std::optional<Finding> check_budgets(const Program& program);

}  // namespace fuzz
