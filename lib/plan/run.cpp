// Runs a plan: nested checkpoint() calls, as its brackets stand, and what moves.
//
// Note [What a plan moves]
// Each item that moves what it saves has a depot of its own. Copying out begins while it runs, of what nobody
// else holds, and goes on beside the item behind it, at whose end it is waited for: never are more than two items'
// bytes in memory on their way out. Copying back begins when the gradient of the output of that
// item behind is there, by a hook on it: beside its backward. All depots share one place, so one file.

#include <functional>
#include <optional>
#include <utility>

#include "hooks/depot.h"
#include "lib/plan/cost.h"
#include "lib/plan/moves.h"
#include "lib/scope/offload.h"
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

at::Tensor run_item(const std::shared_ptr<const Program>& program, PlanItem item, at::Tensor x);

struct RegionOfPlan {
  std::shared_ptr<const Program> program;
  std::size_t region;
  at::Tensor operator()(at::Tensor x) const { return run_items(program, region, std::move(x)); }
};

// Each tensor is moved on: whoever still held the input of a region that has begun would keep what
// its plan counts as gone.
at::Tensor run_items(const std::shared_ptr<const Program>& program, std::size_t region,
                     at::Tensor x) {
  for (const PlanItem item : program->items[region]) x = run_item(program, item, std::move(x));
  return x;
}

at::Tensor run_item(const std::shared_ptr<const Program>& program, PlanItem item, at::Tensor x) {
  if (item > 0) return program->stages[static_cast<std::size_t>(item - 1)](std::move(x));
  const auto region = static_cast<std::size_t>(-item);
  return checkpoint(program->options[region], RegionOfPlan{program, region}, std::move(x));
}

/// The program around all regions. See Note [What a plan moves].
at::Tensor run_moving(const std::shared_ptr<const Program>& program, const Plan& plan,
                      const std::shared_ptr<Place>& place, int64_t min_bytes, at::Tensor x) {
  std::shared_ptr<Depot> before;  // of the item before, if it moves
  auto moved = plan.moved().begin();
  for (const PlanItem item : program->items[0]) {
    const int64_t first =
        item > 0 ? item : plan.regions()[static_cast<std::size_t>(-item) - 1].first;
    std::shared_ptr<Depot> depot;
    if (moved != plan.moved().end() && *moved == first) {
      depot = depot_of_moves(place, min_bytes);
      ++moved;
    }
    {
      std::optional<DepotGuard> guard;
      if (depot != nullptr) guard.emplace(depot);
      x = run_item(program, item, std::move(x));
    }
    if (before != nullptr) {
      before->finish_stores();
      // A leaf outlives the step: a stage has returned the caller's tensor.
      if (x.requires_grad() && !x.is_leaf())
        x.register_hook([before](const at::Tensor&) { before->begin_loads(); });
    }
    before = std::move(depot);
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
               const CheckpointOptions& options, const std::vector<Policy>& policies,
               const MoveOptions& moving) {
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
  if (plan.moved().empty()) return run_items(program, 0, std::move(input));
  const std::shared_ptr<Place> place = place_of(moving, input.device(), "remat::run");
  return run_moving(program, plan, place, moving.min_bytes, std::move(input));
}

}  // namespace remat
