#pragma once
// All plans of short chains, and chains that several tests of the planner use.

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "remat/plan.h"

namespace remat::testing {

/// The regions of every plan of stages s..t. Canonical: each level ends with a plain stage. There
/// are 1, 2, 6, 22, 90, 394 canonical ones of 1 to 6 stages.
inline std::vector<std::vector<PlanRegion>> region_lists(int64_t s, int64_t t, bool is_canonical) {
  if (s > t) return {{}};
  std::vector<std::vector<PlanRegion>> lists = region_lists(s + 1, t, is_canonical);
  for (int64_t end = s; end <= (is_canonical ? t - 1 : t); ++end)
    // A region that ends another one holds a canonical plan, so that there are finitely many.
    for (const auto& inside : region_lists(s, end, is_canonical || end == t))
      for (const auto& rest : region_lists(end + 1, t, is_canonical)) {
        std::vector<PlanRegion> list{{s, end}};
        list.insert(list.end(), inside.begin(), inside.end());
        list.insert(list.end(), rest.begin(), rest.end());
        lists.push_back(std::move(list));
      }
  return lists;
}

inline std::vector<Plan> plans_of(int64_t stages, bool is_canonical) {
  std::vector<Plan> plans;
  for (auto& list : region_lists(1, stages, is_canonical))
    plans.emplace_back(stages, std::move(list));
  return plans;
}

inline std::vector<Plan> canonical_plans(int64_t stages) { return plans_of(stages, true); }
inline std::vector<Plan> all_plans(int64_t stages) { return plans_of(stages, false); }

/// The plans with every choice of the items that move, but for the last one.
inline std::vector<Plan> plans_moving(const std::vector<Plan>& plans) {
  std::vector<Plan> all;
  for (const Plan& plan : plans) {
    std::vector<int64_t> firsts;  // of the items outside of regions
    int64_t end = 0;
    for (int64_t stage = 1; stage <= plan.stages(); ++stage) {
      if (stage <= end) continue;
      end = stage;
      for (const PlanRegion& each : plan.regions())
        if (each.first == stage) end = std::max(end, each.last);
      if (end < plan.stages()) firsts.push_back(stage);
    }
    for (std::size_t choice = 0; choice < std::size_t{1} << firsts.size(); ++choice) {
      std::vector<int64_t> moved;
      for (std::size_t i = 0; i < firsts.size(); ++i)
        if ((choice >> i & 1) != 0) moved.push_back(firsts[i]);
      all.emplace_back(plan.stages(), plan.regions(), std::move(moved));
    }
  }
  return all;
}

/// Equal stages of one second that save nothing but input and output, all of one byte, and a loss
/// that costs nothing.
inline ChainCost unit_chain(int64_t stages) {
  ChainCost cost{1, 1, {}};
  cost.stages.assign(static_cast<std::size_t>(stages),
                     {.forward_s = 1, .backward_s = 2, .output_bytes = 1, .grad_bytes = 1});
  cost.stages.emplace_back();
  return cost;
}

}  // namespace remat::testing
