// Runs a plan: nested checkpoint() calls, as its brackets stand.

#include <utility>

#include "lib/plan/cost.h"
#include "remat/checkpoint.h"

namespace remat {

namespace {

/// What all regions of one run share, and the graph keeps: the caller's vector may die before.
struct Program {
  std::vector<Stage> stages;
  std::vector<std::vector<PlanItem>> items;
  std::vector<CheckpointOptions> options;  // of each region, and (0) of the program around them
};

at::Tensor run_items(const std::shared_ptr<const Program>& program, std::size_t region,
                     at::Tensor x);

struct RegionOfPlan {
  std::shared_ptr<const Program> program;
  std::size_t region;
  at::Tensor operator()(at::Tensor x) const { return run_items(program, region, std::move(x)); }
};

// Each tensor is moved on: whoever still held the input of a region that has begun would keep what
// its plan counts as gone.
at::Tensor run_items(const std::shared_ptr<const Program>& program, std::size_t region,
                     at::Tensor x) {
  for (const PlanItem item : program->items[region]) {
    if (item > 0) {
      x = program->stages[static_cast<std::size_t>(item - 1)](std::move(x));
    } else {
      const auto inner = static_cast<std::size_t>(-item);
      x = checkpoint(program->options[inner], RegionOfPlan{program, inner}, std::move(x));
    }
  }
  return x;
}

CheckpointOptions named(CheckpointOptions options, const PlanRegion& region) {
  const std::string stages = region.first == region.last
                                 ? c10::str("stage ", region.first)
                                 : c10::str("stages ", region.first, " to ", region.last);
  options.name = options.name.empty() ? stages : c10::str(options.name, ", ", stages);
  return options;
}

}  // namespace

at::Tensor run(const Plan& plan, const std::vector<Stage>& stages, at::Tensor input,
               const CheckpointOptions& options, const std::vector<Policy>& policies) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(stages.size()) == plan.stages(),
                    "remat::run: the plan has ", plan.stages(), " stages, but ", stages.size(),
                    " functions were passed.");
  for (std::size_t i = 0; i < stages.size(); ++i)
    TORCH_CHECK_VALUE(stages[i], "remat::run: the function of stage ", i + 1, " is empty.");
  TORCH_CHECK_VALUE(plan.policies() <= static_cast<int64_t>(policies.size()),
                    "remat::run: the plan has a region with policy ", plan.policies(), ", but ",
                    policies.size(),
                    " policies were passed.\nDo: pass those that the stages were measured with.");
  const auto program = std::make_shared<Program>(Program{stages, items_of(plan), {options}});
  for (const PlanRegion& region : plan.regions()) {
    program->options.push_back(named(options, region));
    if (region.policy > 0)
      program->options.back().policy = policies[static_cast<std::size_t>(region.policy - 1)];
  }
  return run_items(program, 0, std::move(input));
}

}  // namespace remat
