// Values that budgets drop first, by choices than the library's own, and with a frozen table of
// costs.

#include <remat/budget.h>

#include <limits>
#include <tuple>

#include "remat/budget_trial.h"
#include "tests/support/support.h"

using namespace remat::testing;
using remat::budget::Choice;

namespace {

constexpr int64_t side = 64, bytes = 12 * side * side * 4;

/// A chain whose dropout masks are drawn in place. Returns its gradient.
Tensor gradient() {
  const Seed seed(5);
  Tensor x = leaf({side, side});
  Tensor y = x;
  for (int i = 0; i < 10; ++i) y = at::dropout(y.mm(x).div(8).sin(), 0.3, true).tanh();
  return torch::autograd::grad({y.sum()}, {x}).front();
}

std::tuple<int64_t, int64_t, int64_t> counts_within_budget(const Tensor& plain) {
  remat::budget::begin_work();
  const remat::BudgetGuard guard({.bytes = bytes, .min_bytes = 0});
  CHECK(gradient().equal(plain));
  const remat::BudgetReport report = guard.report();
  CHECK(report.evictions > 0);
  CHECK(report.peak_bytes <= bytes);
  return {report.evictions, report.reruns, remat::budget::end_work().copies};
}

}  // namespace

TEST_CASE("every choice of what to drop gives the same gradients, and repeats with frozen costs",
          "[budget]") {
  const Tensor plain = gradient();
  {
    const remat::BudgetGuard guard({.bytes = std::numeric_limits<int64_t>::max()});
    gradient();
  }
  remat::budget::set_costs(remat::budget::costs());
  for (const Choice choice :
       {Choice::Reverse, Choice::Dtr, Choice::LeastRecent, Choice::Size, Choice::Random}) {
    INFO("choice " << static_cast<int>(choice));
    remat::budget::set_choice(choice, 7);
    const auto first = counts_within_budget(plain);
    remat::budget::set_choice(choice, 7);
    CHECK(counts_within_budget(plain) == first);
  }
  remat::budget::set_choice(Choice::Reverse);
  remat::budget::set_costs({});
}

TEST_CASE("a rerun draws a dropout mask into the memory that was made for it", "[budget]") {
  const Tensor plain = gradient();
  const auto [evictions, reruns, copies] = counts_within_budget(plain);
  CHECK(copies == 0);
}
