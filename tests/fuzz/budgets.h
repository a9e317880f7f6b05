#pragma once
// Runs programs without regions, plainly and under byte budgets.

#include <cstdint>
#include <optional>

#include "tests/fuzz/run.h"

namespace fuzz {

/// Returns the budget [bytes] of programs on their threads; 0: none.
int64_t& budget_bytes();
/// Returns the switch for moves within the budget, to the CPU or into a file.
bool& budget_moves();

/// Runs the program under a budget without a limit, and under six others. Returns a finding if they
/// disagree.
std::optional<Finding> check_budgets(const Program& program);

}  // namespace fuzz
