// Runs a plan: nested checkpoint() calls in the order of its brackets, and moves.
//
// Note [What a plan moves]
// Each item that moves its saved tensors has a depot of its own. While the item runs, the depot
// begins to copy out tensors that have no other holder. Copying continues beside the item behind,
// at whose end it is waited for. So at most two items' bytes are in memory on their way out.
//
// A hook on the output of the item behind begins to copy back when that output's gradient is
// complete. So copies run beside that item's backward. All depots share one place, and so one file.

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hooks/depot/depot.h"
#include "lib/move/depots.h"
#include "lib/plan/cost.h"
#include "lib/plan/moves.h"
#include "remat/binding.h"
#include "remat/checkpoint.h"

namespace remat {

namespace {

/// The state that all regions of one run share. The graph keeps it alive, since the caller's vector
/// may die before backward.
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

// Each tensor is passed on by move. A copy here would keep the input of a region that has begun,
// which the plan counts as freed.
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

/// Gives a depot to each item that moves something, while the program around all regions runs.
/// See Note [What a plan moves].
class Moves {
 public:
  Moves(std::shared_ptr<Place> place, int64_t min_bytes)
      : place_(std::move(place)), min_bytes_(min_bytes) {}

  /// Runs the next item. `moves`: whether its saved tensors move. `name`: returns its name for
  /// recorders.
  template <class RunItem, class Name>
  at::Tensor run(bool moves, const Name& name, const RunItem& run_item) {
    std::shared_ptr<Depot> depot;
    if (moves) depot = depot_of_moves(place_, min_bytes_, name());
    at::Tensor x;
    {
      std::optional<DepotGuard> guard;
      if (depot != nullptr) guard.emplace(depot);
      x = run_item();
    }
    if (before_ != nullptr) {
      before_->finish_stores();
      // No hook on a leaf, which outlives the step: a stage has returned the caller's tensor.
      if (x.requires_grad() && !x.is_leaf())
        x.register_hook([before = before_](const at::Tensor&) { before->begin_loads(); });
    }
    before_ = std::move(depot);
    return x;
  }

 private:
  const std::shared_ptr<Place> place_;
  const int64_t min_bytes_;
  std::shared_ptr<Depot> before_;  // the depot of the item before, if that moves
};

std::string name_of(const std::string& program, int64_t first, int64_t last) {
  const std::string stages =
      first == last ? c10::str("stage ", first) : c10::str("stages ", first, " to ", last);
  return program.empty() ? stages : c10::str(program, ", ", stages);
}

CheckpointOptions named(CheckpointOptions options, const PlanRegion& region) {
  options.name = name_of(options.name, region.first, region.last);
  return options;
}

/// Runs the items outside of regions. `name`: the program's name.
at::Tensor run_outermost(const Plan& plan, at::Tensor input, const MoveOptions& moving,
                         const std::string& name, const ItemRun& run_item) {
  const std::vector<PlanItem> items = items_of(plan)[0];
  std::optional<Moves> moves;
  if (moves_anything(plan))
    moves.emplace(place_of(moving, input.device(), "remat::run"), moving.min_bytes);
  for (std::size_t i = 0; i < items.size(); ++i) {
    const auto run_here = [&] { return run_item(i, std::move(input)); };
    if (!moves) {
      input = run_here();
      continue;
    }
    const PlanRegion item = items[i] > 0 ? PlanRegion{items[i], items[i]}
                                         : plan.regions()[static_cast<std::size_t>(-items[i]) - 1];
    const bool is_moved = std::binary_search(plan.moved().begin(), plan.moved().end(), item.first);
    input = moves->run(is_moved, [&] { return name_of(name, item.first, item.last); }, run_here);
  }
  return input;
}

}  // namespace

at::Tensor run(const Plan& plan, const std::vector<Stage>& stages, at::Tensor input,
               const CheckpointOptions& options, const MoveOptions& moving) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(stages.size()) == plan.stages(),
                    "remat::run: the plan has ", plan.stages(), " stages, but ", stages.size(),
                    " functions were passed.");
  for (std::size_t i = 0; i < stages.size(); ++i)
    TORCH_CHECK_VALUE(stages[i], "remat::run: the function of stage ", i + 1, " is empty.");
  const auto program = std::make_shared<Program>(Program{stages, items_of(plan), {options}});
  for (const PlanRegion& region : plan.regions())
    program->options.push_back(named(options, region));
  return run_outermost(plan, std::move(input), moving, options.name,
                       [&program](std::size_t item, at::Tensor x) {
                         return run_item(program, program->items[0][item], std::move(x));
                       });
}

at::Tensor run_items(const Plan& plan, at::Tensor input, const MoveOptions& moving,
                     const ItemRun& run_item) {
  return run_outermost(plan, std::move(input), moving, {}, run_item);
}

}  // namespace remat
