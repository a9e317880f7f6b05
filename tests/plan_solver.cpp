// remat/plan.h: frontiers and simulations, against expected values and against all plans there are.

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>

#include "tests/plan_chains.h"
#include "tests/plan_vectors.h"
#include "tests/support/support.h"

namespace {

using remat::ChainCost;
using remat::Frontier;
using remat::FrontierPoint;
using remat::Plan;
using remat::PlanRegion;
using remat::SolveOptions;
using remat::StageCost;
using remat::testing::canonical_plans;
using remat::testing::plans_moving;
using remat::testing::unit_chain;
namespace vectors = remat::testing::plan_vectors;

using Points = std::vector<std::pair<int64_t, double>>;

ChainCost cost_of(const vectors::Chain& chain) {
  ChainCost cost{chain.x_bytes[0], chain.x_bytes[0], {}};
  for (std::size_t k = 0; k < chain.forward_s.size(); ++k)
    cost.stages.push_back({.forward_s = chain.forward_s[k],
                           .backward_s = chain.backward_s[k],
                           .forward_to_last_save_s = chain.to_last_save_s[k],
                           .output_bytes = chain.x_bytes[k + 1],
                           .saved_bytes = chain.saved_bytes[k],
                           .forward_tmp_bytes = chain.forward_tmp_bytes[k],
                           .backward_tmp_bytes = chain.backward_tmp_bytes[k],
                           .grad_bytes = chain.x_bytes[k + 1],
                           .saves_output = chain.saves_output[k] != 0});
  return cost;
}

/// Equal blocks and a loss that costs nothing.
ChainCost block_chain(int64_t blocks) {
  ChainCost cost{1, 1, {}};
  cost.stages.assign(static_cast<std::size_t>(blocks), {.forward_s = 1,
                                                        .backward_s = 2,
                                                        .forward_to_last_save_s = 2.0 / 3,
                                                        .output_bytes = 1,
                                                        .saved_bytes = 16,
                                                        .grad_bytes = 1,
                                                        .saves_output = false});
  cost.stages.emplace_back();
  return cost;
}

Points points_of(const Frontier& frontier) {
  Points points;
  for (const FrontierPoint& point : frontier.points())
    points.emplace_back(point.bytes, point.extra_s);
  return points;
}

/// The points that no other beats, bytes rising.
Points best_of(const std::map<int64_t, double>& least) {
  Points best;
  for (const auto& [bytes, extra] : least)
    if (best.empty() || extra < best.back().second) best.emplace_back(bytes, extra);
  return best;
}

double extra_at(const Frontier& frontier, int64_t bytes) {
  double extra = std::numeric_limits<double>::infinity();
  for (const FrontierPoint& point : frontier.points())
    if (point.bytes <= bytes) extra = point.extra_s;
  return extra;
}

int64_t bytes_at(const Frontier& frontier, double extra) {
  for (const FrontierPoint& point : frontier.points())
    if (point.extra_s <= extra + 1e-9) return point.bytes;
  return -1;
}

bool has_last_stage_in_region(const Plan& plan) {
  return std::ranges::any_of(
      plan.regions(), [&](const PlanRegion& region) { return region.last == plan.stages(); });
}

/// Costs as they come: whole numbers, so that sums are exact.
class RandomChains {
 public:
  explicit RandomChains(uint64_t seed) : random_(seed) {}

  int64_t number(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }

  ChainCost chain(int64_t stages) {
    // A few kinds of stages, so that equal ones and zeros are common.
    const bool has_equal_stages = number(0, 2) == 0;
    std::vector<StageCost> kinds;
    for (int64_t i = 0; i < 2; ++i) kinds.push_back(stage());
    ChainCost cost{number(0, 6), number(0, 6), {}};
    for (int64_t k = 0; k < stages; ++k)
      cost.stages.push_back(has_equal_stages ? kinds[static_cast<std::size_t>(number(0, 1))]
                                             : stage());
    if (number(0, 1) == 1) cost.stages.back() = {};
    if (number(0, 3) == 0) cost.cached_cast_bytes = number(0, 20);
    if (number(0, 1) == 0)
      cost.held_to_end_bytes =
          number(0, cost.stages.back().output_bytes + cost.stages.back().grad_bytes);
    return cost;
  }

  /// ... of which most of what stages save or return can move, in any time.
  ChainCost moving_chain(int64_t stages) {
    ChainCost cost = chain(stages);
    for (StageCost& each : cost.stages) {
      each.movable_bytes = number(0, each.saved_bytes);
      each.has_movable_output = number(0, 3) > 0;
    }
    cost.moving = remat::MoveCost{.store_s_per_byte = static_cast<double>(number(0, 3)),
                                  .load_s_per_byte = static_cast<double>(number(0, 3)),
                                  .held_up_share = static_cast<double>(number(0, 1))};
    return cost;
  }

 private:
  StageCost stage() {
    StageCost cost;
    cost.forward_s = static_cast<double>(number(0, 9));
    cost.backward_s = 2 * cost.forward_s;
    if (number(0, 2) > 0)
      cost.forward_to_last_save_s =
          static_cast<double>(number(0, static_cast<int64_t>(cost.forward_s)));
    cost.output_bytes = number(0, 6);
    cost.grad_bytes = number(0, 2) == 0 ? number(0, 9) : cost.output_bytes;
    cost.saved_bytes = number(0, 12);
    cost.forward_tmp_bytes = number(0, 3);
    cost.backward_tmp_bytes = number(0, 3);
    if (number(0, 3) == 0) cost.unsaved_tmp_bytes = number(0, 9);
    if (number(0, 2) == 0) cost.first_read_tmp_bytes = number(0, 9);
    if (number(0, 2) == 0) cost.stopped_tmp_bytes = number(0, 9);
    cost.saves_output = number(0, 1) == 1;
    cost.saves_input = number(0, 2) > 0;
    if (number(0, 2) == 0) cost.backward_bytes = number(0, 30);
    if (number(0, 2) == 0) cost.region_backward_bytes = number(0, 30);
    if (number(0, 2) == 0) cost.lone_backward_bytes = number(0, 30);
    return cost;
  }

  std::mt19937_64 random_;
};

}  // namespace

TEST_CASE("solve finds the frontiers, plans and calls of the known chains", "[plan]") {
  for (const vectors::Case& known : vectors::chains) {
    INFO("chain " << known.name);
    const ChainCost cost = cost_of(known.chain);
    SolveOptions options{.early_stop = known.early_stop};
    const Frontier frontier = remat::solve(cost, options);
    REQUIRE(frontier.points().size() == known.frontier.size());
    for (std::size_t i = 0; i < known.frontier.size(); ++i) {
      const vectors::Point& point = known.frontier[i];
      INFO(point.plan);
      CHECK(frontier.points()[i].bytes == point.bytes);
      CHECK(frontier.points()[i].extra_s == point.extra_s);
      const Plan plan = frontier.plan(point.bytes);
      CHECK(plan.to_string() == point.plan);
      CHECK(plan.calls() == point.calls);
      const remat::Simulation simulation = remat::simulate(cost, plan, options);
      CHECK(simulation.peak_bytes == point.bytes);
      CHECK(simulation.extra_s == point.extra_s);
      CHECK(simulation.calls == point.calls);
      CHECK(simulation.frames == plan.frames());
      CHECK(simulation.depth == plan.depth());
      if (i > 0) CHECK(frontier.plan(point.bytes - 1).to_string() == known.frontier[i - 1].plan);
    }
    options.max_depth = 1;
    Points one_level;
    for (const vectors::ByBytes& point : known.one_level)
      one_level.emplace_back(point.bytes, point.extra_s);
    CHECK(points_of(remat::solve(cost, options)) == one_level);
  }
}

TEST_CASE("the frontier is the best of all plans of up to six stages", "[plan]") {
  const Seed seed;
  RandomChains random(seed.value());
  for (int64_t i = 0; i < 1000; ++i) {
    const ChainCost cost = random.chain(1 + i % 6);
    const SolveOptions options{.max_depth = random.number(0, 2),
                               .early_stop = random.number(0, 4) > 0,
                               .frame_cost_s = random.number(0, 2) == 0 ? 2.0 : 0.0};
    std::map<int64_t, double> least;  // extra seconds by peak
    for (const Plan& plan : canonical_plans(static_cast<int64_t>(cost.stages.size()))) {
      if (options.max_depth > 0 && plan.depth() > options.max_depth) continue;
      const remat::Simulation simulation = remat::simulate(cost, plan, options);
      const auto [entry, is_new] = least.try_emplace(simulation.peak_bytes, simulation.extra_s);
      if (!is_new) entry->second = std::min(entry->second, simulation.extra_s);
    }
    INFO("chain " << i);
    const Frontier frontier = remat::solve(cost, options);
    REQUIRE(points_of(frontier) == best_of(least));
    for (const FrontierPoint& point : frontier.points()) {
      const Plan plan = frontier.plan(point.bytes);
      const remat::Simulation simulation = remat::simulate(cost, plan, options);
      REQUIRE(simulation.peak_bytes == point.bytes);
      REQUIRE(simulation.extra_s == point.extra_s);
      REQUIRE((options.max_depth == 0 || plan.depth() <= options.max_depth));
    }
  }
}

TEST_CASE("where saves may move the frontier is the best of all plans of up to five stages",
          "[plan]") {
  const Seed seed;
  RandomChains random(seed.value());
  int64_t num_points = 0, num_moving = 0;
  for (int64_t i = 0; i < 200; ++i) {
    const ChainCost cost = random.moving_chain(1 + i % 5);
    const SolveOptions options{.max_depth = random.number(0, 2),
                               .early_stop = random.number(0, 4) > 0,
                               .frame_cost_s = random.number(0, 2) == 0 ? 2.0 : 0.0};
    std::map<int64_t, double> least;  // extra seconds by peak
    for (const Plan& plan : plans_moving(canonical_plans(1 + i % 5))) {
      if (options.max_depth > 0 && plan.depth() > options.max_depth) continue;
      const remat::Simulation simulation = remat::simulate(cost, plan, options);
      const auto [entry, is_new] = least.try_emplace(simulation.peak_bytes, simulation.extra_s);
      if (!is_new) entry->second = std::min(entry->second, simulation.extra_s);
    }
    INFO("chain " << i);
    const Frontier frontier = remat::solve(cost, options);
    REQUIRE(points_of(frontier) == best_of(least));
    for (const FrontierPoint& point : frontier.points()) {
      const Plan plan = frontier.plan(point.bytes);
      INFO(plan.to_string());
      const remat::Simulation simulation = remat::simulate(cost, plan, options);
      REQUIRE(simulation.peak_bytes == point.bytes);
      REQUIRE(simulation.extra_s == point.extra_s);
      REQUIRE(Plan::parse(plan.to_string()) == plan);
      ++num_points;
      num_moving += plan.moved().empty() ? 0 : 1;
    }
  }
  CHECK(10 * num_moving > num_points);
}

TEST_CASE("longer chains that may move cost what their points say, never more than without",
          "[plan]") {
  const Seed seed;
  RandomChains random(seed.value());
  bool is_faster = false, is_smaller = false;
  for (int64_t i = 0; i < 12; ++i) {
    const ChainCost cost = random.moving_chain(15 + i);
    ChainCost without = cost;
    without.moving.reset();
    const SolveOptions options{.max_depth = random.number(0, 3)};
    const Frontier frontier = remat::solve(cost, options), staying = remat::solve(without, options);
    for (const FrontierPoint& point : frontier.points()) {
      const remat::Simulation simulation =
          remat::simulate(cost, frontier.plan(point.bytes), options);
      REQUIRE(simulation.peak_bytes == point.bytes);
      REQUIRE(simulation.extra_s == point.extra_s);
    }
    for (const FrontierPoint& point : staying.points()) {
      REQUIRE(extra_at(frontier, point.bytes) <= point.extra_s);
      is_faster |= extra_at(frontier, point.bytes) < point.extra_s;
    }
    is_smaller |= frontier.points().front().bytes < staying.points().front().bytes;
  }
  CHECK(is_faster);
  CHECK(is_smaller);
}

TEST_CASE("a region at the end of another one, legal in a plan, improves nothing", "[plan]") {
  const Seed seed;
  RandomChains random(seed.value());
  for (int64_t i = 0; i < 60; ++i) {
    const ChainCost cost = random.chain(1 + i % 4);
    const Frontier frontier = remat::solve(cost);
    for (const Plan& plan : remat::testing::all_plans(static_cast<int64_t>(cost.stages.size()))) {
      const remat::Simulation simulation = remat::simulate(cost, plan);
      INFO(plan.to_string());
      REQUIRE(simulation.calls == plan.calls());
      // solve looks at no region that has the last stage.
      if (!has_last_stage_in_region(plan))
        REQUIRE(extra_at(frontier, simulation.peak_bytes) <= simulation.extra_s);
    }
  }
}

TEST_CASE("a region around the last stage pays where its forward takes more beside what it saves",
          "[plan]") {
  // With its saves 8 + 8 bytes, without first 8, then 8 beside nothing temporary.
  ChainCost cost{0, 0, {}};
  cost.stages.push_back({.forward_s = 1,
                         .backward_s = 2,
                         .forward_to_last_save_s = 0.5,
                         .saved_bytes = 8,
                         .forward_tmp_bytes = 8,
                         .stopped_tmp_bytes = 0});
  CHECK(points_of(remat::solve(cost)) == Points{{16, 0}});
  const remat::Simulation around = remat::simulate(cost, Plan::parse("[ck[1]]"));
  CHECK(around.peak_bytes == 8);
  CHECK(around.extra_s == 0.5);
}

TEST_CASE("plans of longer chains cost what their points say, and more depth never costs more",
          "[plan]") {
  const Seed seed;
  RandomChains random(seed.value());
  for (int64_t i = 0; i < 12; ++i) {
    const ChainCost cost = random.chain(15 + i);
    const Frontier unlimited = remat::solve(cost);
    Frontier shallower = remat::solve(cost, {.max_depth = 1});
    for (const int64_t depth : {1, 2, 3, 5, 13, 100}) {
      const Frontier frontier = remat::solve(cost, {.max_depth = depth});
      for (const FrontierPoint& point : frontier.points()) {
        const Plan plan = frontier.plan(point.bytes);
        const remat::Simulation simulation = remat::simulate(cost, plan);
        REQUIRE(plan.depth() <= depth);
        REQUIRE(simulation.peak_bytes == point.bytes);
        REQUIRE(simulation.extra_s == point.extra_s);
        REQUIRE(extra_at(unlimited, point.bytes) <= point.extra_s);
      }
      for (const FrontierPoint& point : shallower.points())
        REQUIRE(extra_at(frontier, point.bytes) <= point.extra_s);
      shallower = frontier;
    }
    CHECK(points_of(shallower) == points_of(unlimited));
  }
}

TEST_CASE("less memory never needs less time, and below the minimum there is no plan", "[plan]") {
  const Seed seed;
  RandomChains random(seed.value());
  for (int64_t i = 0; i < 20; ++i) {
    const ChainCost cost = random.chain(1 + i);
    const Frontier frontier = remat::solve(cost);
    const std::vector<FrontierPoint>& points = frontier.points();
    for (std::size_t k = 1; k < points.size(); ++k) {
      REQUIRE(points[k - 1].bytes < points[k].bytes);
      REQUIRE(points[k - 1].extra_s > points[k].extra_s);
    }
    CHECK(points.back().extra_s == 0);
    int64_t last_peak = 0;
    for (int64_t budget = points.front().bytes; budget <= points.back().bytes + 1; ++budget) {
      const int64_t peak = remat::simulate(cost, frontier.plan(budget)).peak_bytes;
      REQUIRE(peak >= last_peak);
      REQUIRE(peak <= budget);
      last_peak = peak;
    }
    for (const int64_t too_small :
         {points.front().bytes - 1, int64_t{-1}, std::numeric_limits<int64_t>::min()}) {
      const auto error =
          error_of<remat::InfeasibleBudget>([&] { static_cast<void>(frontier.plan(too_small)); });
      CHECK(error.minimum_bytes() == points.front().bytes);
      CHECK_THAT(text_of(error), contains("no plan fits into " + std::to_string(too_small)));
    }
  }
}

TEST_CASE("with eps the frontier has fewer points and stays within its bound", "[plan]") {
  const Seed seed;
  RandomChains random(seed.value());
  bool has_fewer = false;
  for (int64_t i = 0; i < 12; ++i) {
    const ChainCost cost = random.chain(24);
    for (const double eps : {0.003, 0.05, 0.5}) {
      const Frontier exact = remat::solve(cost);
      const Frontier rough = remat::solve(cost, {.eps = eps});
      CHECK(rough.points().size() <= exact.points().size());
      has_fewer |= rough.points().size() < exact.points().size();
      CHECK(rough.points().front().bytes == exact.points().front().bytes);
      CHECK(rough.points().back().bytes == exact.points().back().bytes);
      CHECK(rough.points().back().extra_s == 0);
      const double bound = std::pow(1 - eps, -23.0);
      for (const FrontierPoint& point : exact.points()) {
        REQUIRE(extra_at(rough, point.bytes) >= point.extra_s);
        REQUIRE(extra_at(rough, point.bytes) <= point.extra_s * bound * (1 + 1e-12));
      }
      for (const FrontierPoint& point : rough.points()) {
        const remat::Simulation simulation = remat::simulate(cost, rough.plan(point.bytes));
        REQUIRE(simulation.peak_bytes <= point.bytes);
        REQUIRE(simulation.extra_s <= point.extra_s);
      }
    }
  }
  CHECK(has_fewer);
}

TEST_CASE("one level of regions reaches triangular numbers of unit stages", "[plan]") {
  for (int64_t stages = 1; stages <= 60; ++stages) {
    const Frontier frontier = remat::solve(unit_chain(stages), {.max_depth = 1});
    int64_t units = 3;
    while ((units - 1) * (units - 2) / 2 < stages) ++units;
    CHECK(frontier.points().front().bytes == units);
  }
}

TEST_CASE("equal segments cost on unit stages what is known of them, and are not the best",
          "[plan]") {
  const ChainCost cost = unit_chain(100);
  const Frontier frontier = remat::solve(cost);
  for (const vectors::SegmentsRow& row : vectors::segments_100) {
    INFO(row.segments << " segments");
    const Plan plan(101, remat::torch_sequential_plan(100, row.segments).regions());
    const remat::Simulation simulation = remat::simulate(cost, plan);
    CHECK(simulation.peak_bytes == row.peak);
    CHECK(simulation.extra_s == row.extra_s);
    CHECK(extra_at(frontier, row.peak) == row.best_extra_s);
    CHECK(bytes_at(frontier, row.extra_s) == row.best_peak);
  }
}

TEST_CASE("the frontiers of equal blocks are the known ones, with early stop and without",
          "[plan]") {
  for (const vectors::Blocks& known : vectors::blocks) {
    const ChainCost cost = block_chain(known.blocks);
    ChainCost complete = cost;
    for (int64_t k = 0; k < known.blocks; ++k) {
      complete.stages[static_cast<std::size_t>(k)].forward_to_last_save_s = 1;
      complete.stages[static_cast<std::size_t>(k)].saves_output = true;
    }
    const Frontier frontier = remat::solve(cost);
    const auto check = [](const Frontier& found, const std::vector<vectors::ByBytes>& expected) {
      REQUIRE(found.points().size() >= expected.size());
      for (std::size_t i = 0; i < expected.size(); ++i) {
        CHECK(found.points()[i].bytes == expected[i].bytes);
        CHECK(std::abs(found.points()[i].extra_s - expected[i].extra_s) < 0.006);
      }
    };
    check(frontier, known.frontier);
    check(remat::solve(complete, {.early_stop = false}), known.without_early_stop);

    std::vector<PlanRegion> every_block;
    for (int64_t k = 1; k <= known.blocks; ++k) every_block.push_back({k, k});
    for (const vectors::SegmentsRow& row : known.rows) {
      INFO(known.blocks << " blocks, " << row.segments << " segments");
      const std::vector<PlanRegion> regions =
          row.segments == 0  ? std::vector<PlanRegion>{}
          : row.segments < 0 ? every_block
                             : remat::torch_sequential_plan(known.blocks, row.segments).regions();
      const remat::Simulation simulation = remat::simulate(cost, Plan(known.blocks + 1, regions));
      CHECK(simulation.peak_bytes == row.peak);
      CHECK(std::abs(simulation.extra_s - row.extra_s) < 0.006);
      CHECK(std::abs(extra_at(frontier, row.peak) - row.best_extra_s) < 0.006);
      CHECK(bytes_at(frontier, row.extra_s + 0.006) == row.best_peak);
    }
  }
}

TEST_CASE("the plans by formula are optimal on unit stages", "[plan]") {
  for (const int64_t stages : {2, 7, 30}) {
    const ChainCost cost = unit_chain(stages);
    const Frontier frontier = remat::solve(cost);
    for (int64_t units = 1; units < stages; ++units) {
      INFO(stages << " stages, " << units << " units");
      const Plan mixed(stages + 1, remat::mixed_plan(stages, units).regions());
      const remat::Simulation simulation = remat::simulate(cost, mixed);
      CHECK(simulation.peak_bytes <= units + 3);
      CHECK(simulation.extra_s == extra_at(frontier, units + 3));
      // The input, which no budget counts, and two gradients.
      const Plan revolve(stages + 1, remat::revolve_plan(stages, units).regions());
      CHECK(remat::simulate(cost, revolve).peak_bytes <= units + 2 - 1 + 2);
    }
  }
}

TEST_CASE("ties and costs of nothing make no extra points", "[plan]") {
  ChainCost cost;
  cost.stages.resize(12);
  CHECK(points_of(remat::solve(cost)) == Points{{0, 0}});
  CHECK(remat::solve(cost).plan(0) == Plan(12));
  // Sums of thirds: equal only if they do not depend on their order.
  for (StageCost& stage : cost.stages) stage = {.forward_s = 1.0 / 3, .output_bytes = 1};
  const Frontier frontier = remat::solve(cost);
  for (std::size_t i = 1; i < frontier.points().size(); ++i)
    CHECK(frontier.points()[i - 1].extra_s - frontier.points()[i].extra_s > 0.3);
  const ChainCost one{5, 0, {{.forward_s = 1, .output_bytes = 3, .grad_bytes = 2}}};
  CHECK(points_of(remat::solve(one)) == Points{{5, 0}});
}

TEST_CASE("costs of any size are exact, or refused", "[plan]") {
  constexpr int64_t kHalf = int64_t{1} << 62;
  ChainCost cost;
  cost.stages = {{.forward_s = 1e-300, .output_bytes = kHalf - 2}, {.saved_bytes = kHalf}};
  const Frontier frontier = remat::solve(cost);
  CHECK(frontier.plan(std::numeric_limits<int64_t>::max()) == Plan(2));
  CHECK(points_of(frontier).back() == std::pair(kHalf - 2 + kHalf, 0.0));
  CHECK(remat::simulate(cost, frontier.plan(frontier.points().back().bytes)).peak_bytes ==
        kHalf - 2 + kHalf);
  cost.input_bytes = 2;
  CHECK_THROWS_AS(remat::solve(cost), c10::ValueError);
}

TEST_CASE("costs and options out of range are refused with their value", "[plan]") {
  const StageCost good{.forward_s = 1, .output_bytes = 1};
  const auto text = [&](auto change, SolveOptions options = {}) {
    ChainCost cost{0, 0, {good, good}};
    change(cost);
    const std::string of_simulate = text_of(error_of<c10::ValueError>(
        [&] { static_cast<void>(remat::simulate(cost, Plan(2), options)); }));
    const std::string of_solve =
        text_of(error_of<c10::ValueError>([&] { static_cast<void>(remat::solve(cost, options)); }));
    CHECK(of_solve == of_simulate);
    return of_solve;
  };
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  CHECK_THAT(text([](ChainCost& c) { c.stages[1].forward_s = -0.5; }),
             contains("forward_s of stage 2 must be finite and at least 0 seconds, got -0.5"));
  CHECK_THAT(text([](ChainCost& c) { c.stages[0].backward_s = kNaN; }), contains("got nan"));
  CHECK_THAT(text([](ChainCost& c) { c.stages[0].forward_s = kInfinity; }), contains("got inf"));
  CHECK_THAT(text([](ChainCost& c) { c.stages[0].forward_to_last_save_s = 2; }),
             contains("at most its forward_s of 1, got 2"));
  CHECK_THAT(text([](ChainCost& c) { c.stages[0].forward_to_last_save_s = kNaN; }),
             contains("got nan"));
  CHECK_THAT(text([](ChainCost& c) { c.stages[0].forward_s = c.stages[1].forward_s = 1e308; }),
             contains("add up to more than a double holds"));
  CHECK_THAT(text([](ChainCost& c) { c.input_grad_bytes = -7; }),
             contains("input_grad_bytes must be at least 0 bytes, got -7"));
  CHECK_THAT(text([](ChainCost& c) { c.cached_cast_bytes = -7; }),
             contains("cached_cast_bytes must be at least 0 bytes, got -7"));
  CHECK_THAT(text([](ChainCost& c) { c.held_to_end_bytes = -7; }),
             contains("held_to_end_bytes must be at least 0 bytes, got -7"));
  CHECK_THAT(text([](ChainCost& c) { c.held_to_end_bytes = 2; }),
             contains("output_bytes and grad_bytes of the last stage, 1, got 2"));
  for (int64_t StageCost::* member :
       {&StageCost::output_bytes, &StageCost::saved_bytes, &StageCost::forward_tmp_bytes,
        &StageCost::backward_tmp_bytes, &StageCost::grad_bytes, &StageCost::first_read_tmp_bytes})
    CHECK_THAT(text([&](ChainCost& c) { c.stages[1].*member = -3; }),
               contains("of stage 2 must be at least 0 bytes, got -3"));
  const auto nothing = [](ChainCost&) {};
  CHECK_THAT(text([](ChainCost& c) { c.stages.clear(); }), contains("at least one stage, got 0"));
  CHECK_THAT(text(nothing, {.max_depth = -1}), contains("max_depth must be at least 0"));
  CHECK_THAT(text(nothing, {.frame_cost_s = -1}), contains("frame_cost_s must be finite"));
  CHECK_THAT(text(nothing, {.eps = 1}), contains("eps must be in [0, 1), got 1"));
  CHECK_THAT(text(nothing, {.eps = kNaN}), contains("eps must be in [0, 1), got nan"));
  CHECK_THAT(text_of(error_of<c10::ValueError>(
                 [&] { static_cast<void>(remat::simulate(ChainCost{0, 0, {good}}, Plan(2))); })),
             contains("the plan has 2 stages, the chain has 1"));
}

TEST_CASE("plans of ten thousand stages are read, written and simulated", "[plan]") {
  constexpr int64_t kStages = 10'000;
  const ChainCost cost = unit_chain(kStages - 1);
  for (const Plan& plan : {remat::revolve_plan(kStages, 1), remat::revolve_plan(kStages, 40),
                           remat::mixed_plan(kStages, 3), remat::halving_plan(kStages)}) {
    CHECK(Plan::parse(plan.to_string()) == plan);
    const remat::Simulation simulation = remat::simulate(cost, plan);
    CHECK(simulation.calls == plan.calls());
    CHECK(simulation.depth == plan.depth());
  }
  CHECK(remat::revolve_plan(kStages, 1).depth() == kStages - 1);
  std::string nested = "[";
  for (int64_t i = 0; i < kStages; ++i) nested += "ck[";
  nested += "1" + std::string(kStages + 1, ']');
  CHECK(Plan::parse(nested).depth() == kStages);
  CHECK(Plan::parse(nested).to_string() == nested);
}
