// Bodies of solve() and Frontier: the solver's results, looked up by budget.

#include <algorithm>
#include <utility>

#include "lib/plan/cost.h"
#include "lib/plan/solver.h"

namespace remat {

// Without a backtrace: the text is written for the user's program.
InfeasibleBudget::InfeasibleBudget(std::string message, int64_t minimum_bytes)
    : c10::ValueError(std::move(message), /*backtrace=*/nullptr), minimum_bytes_(minimum_bytes) {}

Frontier::Frontier(std::shared_ptr<const detail::FrontierTable> table)
    : table_(std::move(table)), points_(table_->points()) {}

Plan Frontier::plan(int64_t budget_bytes) const {
  const auto above = std::upper_bound(
      points_.begin(), points_.end(), budget_bytes,
      [](int64_t budget, const FrontierPoint& point) { return budget < point.bytes; });
  if (above == points_.begin())
    throw InfeasibleBudget(
        c10::str("remat::Frontier::plan: no plan fits into ", budget_bytes,
                 " bytes beyond the chain's input.\n"
                 "Cause: the plan with the least memory needs ",
                 points_.front().bytes,
                 " bytes.\nHint: raise the budget, use a smaller batch, or split stages."),
        points_.front().bytes);
  // The plan of the point, not of the budget: a plan for more bytes might use them without need.
  return table_->plan((above - 1)->bytes);
}

Frontier solve(const ChainCost& cost, const SolveOptions& options) {
  return Frontier(std::make_shared<const detail::FrontierTable>(complete(cost, options), options));
}

}  // namespace remat
