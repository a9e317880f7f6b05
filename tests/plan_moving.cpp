// remat/plan.h: plans that move what stages save, measured, solved and run.

#include <torch/csrc/autograd/variable.h>

#include <fstream>
#include <regex>

#include "remat/checkpoint.h"
#include "remat/fit.h"
#include "remat/hooks.h"
#include "remat/policy.h"
#include "remat/report.h"
#include "tests/plan_chains.h"
#include "tests/support/executed_plans.h"
#include "tests/support/files.h"
#include "tests/support/support.h"
#include "tests/support/warnings.h"

namespace {

using remat::ChainCost;
using remat::MoveOptions;
using remat::Plan;
using remat::PlanRegion;
using remat::Stage;
using remat::testing::canonical_plans;
using remat::testing::plans_moving;

constexpr int64_t kElements = 50'000;
constexpr int64_t kBytes = kElements * static_cast<int64_t>(sizeof(float));

/// Stages that save different things, and a loss.
std::vector<Stage> various_stages() {
  return {[](const Tensor& x) { return x.sin().cos(); },           // its input, and a value
          [](const Tensor& x) { return (x * x.exp()).tanh(); },    // ... and its output
          [](const Tensor& x) { return at::cat({x, x.sin()}); },   // twice as wide from here on
          [](const Tensor& x) { return x.cos().mul(0.5).cos(); },  // two values
          [](const Tensor& x) { return x.sin().square().mean(); }};
}

}  // namespace

TEST_CASE("what a plan moves is read from its text and written as the same text", "[plan]") {
  for (const char* const text :
       {"[mv[1] 2]", "[1 mv[2] mv[3] 4]", "[mv[ck[1 2]] 3]", "[mv[ck[ck[1] 2]] mv[3] ck[4] 5]"})
    CHECK(Plan::parse(text).to_string() == text);
  const Plan plan = Plan::parse("[mv[ck[ck[1] 2]] mv[3] ck[4] 5]");
  CHECK(plan.moved() == std::vector<int64_t>{1, 3});
  CHECK(plan == Plan(5, {{1, 2}, {1, 1}, {4, 4}}, {1, 3}));
  CHECK_FALSE(plan == Plan(5, {{1, 2}, {1, 1}, {4, 4}}, {1}));

  CHECK_THAT(error_of_parse("[mv[1 2] 3]"), contains("']' after the moved item was expected"));
  for (const char* const text : {"[ck[mv[1]] 2]", "[mv[mv[1]] 2]"})
    CHECK_THAT(error_of_parse(text), contains("'mv[' was found in another bracket"));
  CHECK_THAT(error_of_parse("[mv[1]"), contains("the end of the text was found"));
  CHECK_THAT(error_of_parse("[1 mv[2]]"), contains("the last item, from stage 2, is moved"));
  CHECK_THAT(error_of_parse("[mv[ck[1 2]]]"), contains("the last item, from stage 1, is moved"));
  const auto refused = [](std::vector<PlanRegion> regions, std::vector<int64_t> moved) {
    return text_of(error_of<c10::ValueError>(
        [&] { static_cast<void>(Plan(5, std::move(regions), std::move(moved))); }));
  };
  CHECK_THAT(refused({{1, 3}}, {2}), contains("stage 2, which is inside of a region"));
  CHECK_THAT(refused({{1, 3}, {3, 3}}, {3}), contains("stage 3, which is inside of a region"));
  CHECK_THAT(refused({}, {2, 2}), contains("stage 2, which is out of order"));
  CHECK_THAT(refused({}, {3, 2}), contains("stage 2, which is out of order"));
  CHECK_THAT(refused({}, {0}), contains("stage 0, which is out of order, or outside of 1 to 5"));
  CHECK_THAT(refused({}, {6}), contains("stage 6, which is out of order, or outside of 1 to 5"));
}

TEST_CASE("measure says what of a stage can move, and what copies take", "[plan]") {
  const Folder folder;
  const Tensor x = leaf({kElements});
  const std::vector<Stage> stages{
      [](const Tensor& t) { return t.sin().cos(); },
      [](const Tensor& t) { return t.tanh(); },  // saves its output only
      [](const Tensor& t) { return t * at::ones({kElements}); },
      [](const Tensor& t) { return t.view({2, -1}).sum(1).cos(); },  // two elements
      [](const Tensor& t) { return t.square().sum(); }};
  CHECK_FALSE(remat::measure(stages, x, {.repeats = 1}).moving);
  const ChainCost cost =
      remat::measure(stages, x, {.repeats = 2, .moving = MoveOptions{.directory = folder.path()}});
  REQUIRE(cost.moving);
  CHECK(cost.moving->store_s_per_byte > 0);
  CHECK(cost.moving->load_s_per_byte > 0);
  CHECK(cost.moving->held_up_share > 0);
  CHECK(cost.stages[0].saved_bytes == kBytes);
  CHECK(cost.stages[0].movable_bytes == kBytes);
  CHECK(cost.stages[1].movable_bytes == 0);
  CHECK(cost.stages[2].saved_bytes == kBytes);
  CHECK(cost.stages[2].movable_bytes == kBytes);
  CHECK(cost.stages[0].has_movable_output);
  CHECK(cost.stages[1].has_movable_output);
  CHECK_FALSE(cost.stages[3].has_movable_output);  // smaller than min_bytes
  CHECK_FALSE(cost.stages[4].has_movable_output);
}

TEST_CASE("every plan that moves has plain gradients, and no higher peak than the simulated one",
          "[plan]") {
  const Folder folder;
  const std::vector<Stage> stages = various_stages();
  const Tensor x = leaf({kElements});
  const MoveOptions moving{.directory = folder.path(), .min_bytes = 0};
  const ChainCost cost = remat::measure(stages, x, {.warmup = 0, .repeats = 1, .moving = moving});
  REQUIRE(cost.moving);
  const Executed plain = execute(Plan(5), stages, x, {});
  int64_t num_lower = 0;
  for (const Plan& plan : plans_moving(canonical_plans(5))) {
    INFO(plan.to_string());
    const Executed executed = execute(plan, stages, x, {}, moving);
    const int64_t simulated = remat::simulate(cost, plan).peak_bytes;
    CHECK(executed.peak_bytes <= simulated);
    CHECK(bit_equal(executed.gradient, plain.gradient));
    const Plan staying(5, plan.regions());
    num_lower += simulated < remat::simulate(cost, staying).peak_bytes ? 1 : 0;
  }
  CHECK(num_lower > 50);
}

TEST_CASE("a recorder says what each item of a plan moves", "[plan][recorder]") {
  const Folder folder;
  const Tensor x = leaf({kElements});
  const remat::Recorder recorder;
  const MoveOptions moving{.directory = folder.path(), .min_bytes = 0};
  for (int i = 0; i < 2; ++i)
    remat::run(Plan::parse("[mv[1] mv[ck[2 3]] 4 5]"), various_stages(), x, {}, moving).backward();
  const remat::Report report = recorder.report();
  REQUIRE(report.moves.size() == 2);
  CHECK(report.moves[0].name == "stage 1");
  CHECK(report.moves[0].moves == 2);  // what is inside of it: its input is the caller's
  CHECK(report.moves[0].bytes_loaded == 2 * kBytes);
  CHECK(report.moves[1].name == "stages 2 to 3");
  CHECK(report.moves[1].bytes_moved == 2 * kBytes);  // its input
  CHECK(report.moves[1].loads == 2);
  CHECK(remat::Recorder().report().moves.empty());
}

TEST_CASE("what a plan cannot write since the disk is full stays in memory, with a warning",
          "[plan][faults]") {
  const Folder folder;
  const std::vector<Stage> stages = various_stages();
  const MoveOptions moving{.directory = folder.path(), .min_bytes = 0};
  const Tensor x = leaf({kElements});
  const Tensor plain = execute(Plan(5), stages, x, {}).gradient;
  for (const char* const text : {"[mv[1] mv[ck[2]] mv[3] 4 5]", "[mv[ck[1 2]] mv[3] 4 5]"}) {
    INFO(text);
    std::string warned;
    {
      const remat::testing::Warnings warnings;
      const FileSizeLimit limit(kBytes / 2);
      for (int i = 0; i < 2; ++i)
        CHECK(bit_equal(execute(Plan::parse(text), stages, x, {}, moving).gradient, plain));
      for (const std::string& each : warnings.texts) warned += each;
    }
    CHECK_THAT(warned, contains("stays in memory"));
    CHECK_THAT(warned, contains("could not be written to a file"));
    CHECK(bit_equal(execute(Plan::parse(text), stages, x, {}, moving).gradient, plain));
  }
}

TEST_CASE("a plan that moves runs backward several times, in part, and with its graph", "[plan]") {
  const Folder folder;
  const std::vector<Stage> stages = various_stages();
  const MoveOptions moving{.directory = folder.path(), .min_bytes = 0};
  const Plan plan = Plan::parse(GENERATE(false, true) ? "[mv[1] mv[ck[2]] mv[ck[3]] 4 5]"
                                                      : "[mv[ck[ck[1] 2]] mv[ck[3]] 4 5]");
  const auto results = [&](const Plan& each) {
    Tensors all;
    const Tensor x = leaf({kElements}), y = x * 2;
    const Tensor loss = remat::run(each, stages, y, {}, moving);
    loss.backward({}, /*retain_graph=*/true);
    all.push_back(x.grad().clone());
    const Tensor first = torch::autograd::grad({loss}, {y}, {}, true, true)[0];
    all.push_back(first.detach());
    first.square().sum().backward({}, /*retain_graph=*/true);
    all.push_back(x.grad().clone());
    loss.backward();
    all.push_back(x.grad().clone());
    return all;
  };
  const Seed seed(3);
  const Tensors plain = results(Plan(5));
  at::manual_seed(3);
  const Tensors moved = results(plan);
  REQUIRE(plain.size() == moved.size());
  for (std::size_t i = 0; i < plain.size(); ++i) CHECK(bit_equal(plain[i], moved[i]));
}

TEST_CASE("a plan that moves inside of a region, or on a caller's leaf, has plain gradients",
          "[plan]") {
  const Folder folder;
  const MoveOptions moving{.directory = folder.path(), .min_bytes = 0};
  const std::vector<Stage> stages = various_stages();
  const Plan plan = Plan::parse("[mv[1] mv[ck[2]] mv[ck[3]] 4 5]");
  const Tensor x = leaf({kElements});
  const auto gradient = [&](const auto& loss_of) {
    x.mutable_grad() = Tensor();
    loss_of(x).backward();
    return std::exchange(x.mutable_grad(), Tensor());
  };
  const Tensor plain =
      gradient([&](const Tensor& t) { return remat::run(Plan(5), stages, t, {}, moving); });
  const auto moved = [&](const Tensor& t) { return remat::run(plan, stages, t, {}, moving); };
  CHECK(bit_equal(gradient([&](const Tensor& t) { return remat::checkpoint(moved, t); }), plain));
  {
    const remat::SaveOnDiskGuard around({.directory = folder.path(), .min_bytes = 0});
    CHECK(bit_equal(gradient(moved), plain));
  }
  // Stages that return what they are given: no hook is left on the caller's tensor.
  std::vector<Stage> chain{[](const Tensor& t) { return t; }, [](const Tensor& t) { return t; }};
  chain.insert(chain.end(), stages.begin(), stages.end());
  const auto with_same = [&](const Tensor& t) {
    return remat::run(Plan::parse("[mv[1] mv[2] mv[3] 4 5 6 7]"), chain, t, {}, moving);
  };
  for (int i = 0; i < 3; ++i) CHECK(bit_equal(gradient(with_same), plain));
  CHECK(torch::autograd::impl::hooks(x).empty());
}

TEST_CASE("a value that moves and is changed in place raises in backward", "[plan]") {
  const Folder folder;
  const MoveOptions moving{.directory = folder.path(), .min_bytes = 0};
  Tensor kept;
  const std::vector<Stage> stages{[](const Tensor& t) { return t.sin(); },
                                  [&](const Tensor& t) {
                                    kept = t;
                                    return t.cos();
                                  },
                                  [](const Tensor& t) { return t.sum(); }};
  const Tensor x = leaf({kElements});
  for (const char* const text : {"[1 2 3]", "[mv[1] mv[2] 3]", "[1 mv[ck[2]] 3]"}) {
    INFO(text);
    const Tensor loss = remat::run(Plan::parse(text), stages, x, {}, moving);
    {
      const at::NoGradGuard no_grad;
      kept.mul_(2);
    }
    CHECK_THAT(text_of(error_of<c10::Error>([&] { loss.backward(); })),
               contains("modified by an inplace operation"));
    kept.reset();
  }
}

TEST_CASE("fit moves where that takes less time than recomputing more often", "[plan]") {
  const Folder folder;
  const std::vector<Stage> stages(6, [](const Tensor& t) { return t.sin().cos().sin().cos(); });
  std::vector<Stage> chain = stages;
  chain.emplace_back([](const Tensor& t) { return t.square().mean(); });
  const Tensor x = leaf({kElements});
  const MoveOptions moving{.directory = folder.path(), .min_bytes = 0};
  remat::FitOptions options;
  options.measure = {.repeats = 3, .moving = moving};
  options.measurements = folder.path() + "/measured";
  // With one value more than the least, either inputs are elsewhere or regions nest.
  const ChainCost staying = remat::measure(chain, x, {.repeats = 3});
  const remat::Frontier without = remat::solve(staying);
  const int64_t budget = without.points().front().bytes + kBytes + 8;
  const remat::Fitted measured = remat::fit(chain, x, budget, options);
  CHECK(measured.measured_peak().value() <= budget);
  CHECK_THAT(measured.table(), contains("copies of 1,000,000 bytes take"));

  // The time of copies here depends on what else the machine does: say that they take next to
  // nothing.
  std::string file = text_in(options.measurements);
  REQUIRE_THAT(file, contains("_s_per_byte\": ") && contains("held_up_share\": "));
  file = std::regex_replace(file, std::regex("(_s_per_byte\": )[^,\n]*"), "$011e-15");
  file = std::regex_replace(file, std::regex("(held_up_share\": )[^,\n]*"), "$010.1");
  std::ofstream(options.measurements) << file;
  const remat::Fitted fitted = remat::fit(chain, x, budget, options);
  CHECK_FALSE(fitted.was_measured());
  INFO(fitted.table() << without.plan(budget).to_string());
  CHECK_FALSE(fitted.plan().moved().empty());
  CHECK(fitted.plan().depth() < without.plan(budget).depth());
  CHECK(fitted.measured_peak().value() <= budget);
  CHECK_THAT(fitted.table(), contains("input moved, recomputed") || contains("  moved\n"));
  fitted(x).backward();
  const Tensor gradient = std::exchange(x.mutable_grad(), Tensor());
  remat::run(Plan(7), chain, x).backward();
  CHECK(bit_equal(x.grad(), gradient));
}

TEST_CASE("README: a plan that moves", "[plan][readme]") {
  const Folder folder;
  const std::string directory = folder.path();
  const std::vector<Stage> stages = various_stages();
  const Tensor sample = leaf({kElements}), input = sample;
  const int64_t budget = 13 * kBytes;
  // clang-format off
  const remat::MoveOptions moving{.directory = directory};  // none, for an accelerator: on the CPU
  const remat::ChainCost cost = remat::measure(stages, sample, {.moving = moving});
  const remat::Plan plan = remat::solve(cost).plan(budget);  // [1 mv[2] mv[ck[3 4]] ck[5] 6], say
  const at::Tensor loss = remat::run(plan, stages, input, {}, moving);
  // clang-format on
  CHECK(bit_equal(grad_of(loss, {input})[0], execute(Plan(5), stages, input, {}).gradient));
}

TEST_CASE("a plan that moves says what it lacks", "[plan]") {
  const Folder folder;
  const std::vector<Stage> stages = various_stages();
  const Tensor x = leaf({8});
  const Plan plan = Plan::parse("[mv[1] 2 3 4 5]");
  const auto text = [](const auto& function) {
    return text_of(error_of<c10::ValueError>(function));
  };
  CHECK_THAT(text([&] { remat::run(plan, stages, x); }),
             contains("the plan moves tensors of the CPU, but MoveOptions has no directory"));
  CHECK_THAT(
      text([&] { remat::run(plan, stages, x, {}, {.directory = folder.path() + "/missing"}); }),
      contains("missing"));
  CHECK_THAT(
      text([&] { remat::run(plan, stages, x, {}, {.directory = folder.path(), .min_bytes = -1}); }),
      contains("MoveOptions::min_bytes is -1"));
  CHECK_THAT(text([&] { static_cast<void>(remat::measure(stages, x, {.moving = MoveOptions()})); }),
             contains("remat::measure: the plan moves tensors of the CPU"));
  ChainCost cost = remat::measure(stages, x, {.repeats = 1});
  CHECK_THAT(text([&] { static_cast<void>(remat::simulate(cost, plan)); }),
             contains("the plan moves items, but the chain has no ChainCost::moving"));
  cost.moving = remat::MoveCost{.held_up_share = -1.5};
  CHECK_THAT(text([&] { static_cast<void>(remat::solve(cost)); }),
             contains("MoveCost::held_up_share must be finite and at least 0, got -1.5"));
  cost.moving = remat::MoveCost{.store_s_per_byte = -1};
  CHECK_THAT(text([&] { static_cast<void>(remat::solve(cost)); }),
             contains("store_s_per_byte must be finite and at least 0, got -1"));
  cost.moving = remat::MoveCost{};
  cost.stages[0].movable_bytes = cost.stages[0].saved_bytes + 1;
  CHECK_THAT(text([&] { static_cast<void>(remat::solve(cost)); }),
             contains("movable_bytes of stage 1 must be at least 0 and at most its saved_bytes"));
}
