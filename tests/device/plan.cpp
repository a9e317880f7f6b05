// The planner on the stand-in: stages measured in the device's bytes and time, plans at their
// budgets.

#include "tests/device/stand_in.h"
#include "tests/support/files.h"
#include "tests/support/support.h"

using remat::ChainCost;
using remat::MemoryLimitGuard;
using remat::MemoryMeter;
using remat::Plan;
using remat::Stage;
using remat::StageCost;

namespace {

constexpr int64_t num_elements = 3000, bytes = 4 * num_elements;

Tensor leaf_on(int index) {
  return at::randn({num_elements}).to(stand_in::device(index)).requires_grad_();
}

/// Returns stages of `counts` sines each, and a loss.
std::vector<Stage> sines(const std::vector<int64_t>& counts) {
  std::vector<Stage> stages;
  for (const int64_t count : counts)
    stages.emplace_back([count](Tensor y) {
      for (int64_t i = 0; i < count; ++i) y = y.sin();
      return y;
    });
  stages.emplace_back([](const Tensor& y) { return y.sin().sum(); });
  return stages;
}

struct Step {
  int64_t peak_bytes;
  Tensor gradient;
};

Step step(const Plan& plan, const std::vector<Stage>& stages, const Tensor& x,
          const remat::MoveOptions& moving = {}) {
  const Tensor input = x.detach().requires_grad_();
  stand_in::live_bytes();
  MemoryMeter meter(x.device());
  const int64_t before = meter.live_bytes();
  {
    const Tensor loss = remat::run(plan, stages, input, {}, moving);
    loss.backward(at::ones_like(loss));
  }
  const int64_t peak = meter.peak_bytes() - before;
  return {peak, input.grad().cpu()};
}

}  // namespace

TEST_CASE("measuring stages draws no numbers of the program's", "[device][plan]") {
  const std::vector<Stage> stages{[](const Tensor& y) { return at::dropout(y, 0.5, true).sin(); },
                                  [](const Tensor& y) { return y.sum(); }};
  const Tensor x = leaf_on(1);
  const auto numbers_after = [&](bool measures) {
    at::Generator(at::globalContext().defaultGenerator(x.device())).set_current_seed(3);
    if (measures) remat::measure(stages, x, {.warmup = 0, .repeats = 1});
    return at::dropout(x.detach(), 0.5, true).cpu();
  };
  const Tensor expected = numbers_after(false);
  CHECK(bit_equal(numbers_after(true), expected));
}

TEST_CASE("stages on a device cost its bytes and its time", "[device][plan]") {
  const Tensor x = leaf_on(1);
  struct SlowDevice {
    SlowDevice() { stand_in::set_work_time(std::chrono::milliseconds(10)); }
    ~SlowDevice() { stand_in::set_work_time(std::chrono::nanoseconds(0)); }
  } const slow;
  const uint64_t position = stand_in::position(1);
  const ChainCost cost = remat::measure(sines({3}), x, {.repeats = 2});
  CHECK(stand_in::position(1) == position);
  CHECK(cost.input_bytes == bytes);
  CHECK(cost.input_grad_bytes == bytes);
  const StageCost& stage = cost.stages[0];
  CHECK(stage.output_bytes == bytes);
  CHECK(stage.saved_bytes == 2 * bytes);
  CHECK(stage.grad_bytes == bytes);
  CHECK(stage.backward_tmp_bytes == bytes);  // the cosine
  CHECK(stage.forward_tmp_bytes == 0);
  CHECK_FALSE(stage.saves_output);
  CHECK(stage.unsaved_tmp_bytes == bytes);
  // Each sine is one kernel in forward and two in backward; the first two are before the last save.
  CHECK(stage.forward_s >= 0.030);
  CHECK(stage.forward_to_last_save_s >= 0.020);
  CHECK(stage.forward_to_last_save_s < stage.forward_s - 0.005);
  CHECK(stage.backward_s >= 0.060);
  // 12,000 bytes are rounded to 12,288; the loss is small.
  CHECK(cost.rounding > 288.0 / 12'000 - 1e-9);
  CHECK(cost.rounding < 0.1);
}

TEST_CASE("the bytes of another device count nothing", "[device][plan]") {
  const Tensor x = leaf_on(0);
  const std::vector<Stage> stages{[](const Tensor& y) { return y.sin().sin(); },
                                  [](const Tensor& y) { return y.to(stand_in::device(1)); },
                                  [](const Tensor& y) { return y.sin().sin().sum(); }};
  const ChainCost first = remat::measure(stages, x, {.repeats = 1});
  CHECK(first.stages[0].saved_bytes == bytes);
  CHECK(first.stages[1].output_bytes == 0);
  CHECK(first.stages[2].saved_bytes == 0);
  CHECK(first.stages[2].backward_tmp_bytes == 0);
  const ChainCost second = remat::measure(stages, x, {.repeats = 1, .device = stand_in::device(1)});
  CHECK(second.input_bytes == 0);
  CHECK(second.stages[0].saved_bytes == 0);
  CHECK(second.stages[1].output_bytes == bytes);
  CHECK(second.stages[2].saved_bytes == bytes);
}

TEST_CASE("a device without times of events is measured by waiting for it", "[device][plan]") {
  struct NoTimes {
    NoTimes() { stand_in::set_has_event_times(false); }
    ~NoTimes() { stand_in::set_has_event_times(true); }
  } const no_times;
  const int64_t waits = stand_in::num_waits();
  const ChainCost cost = remat::measure(sines({2}), leaf_on(0), {.repeats = 1});
  CHECK(stand_in::num_waits() > waits);
  CHECK(cost.stages[0].forward_s > 0);
  CHECK(cost.stages[0].backward_s > 0);
  CHECK(cost.stages[0].forward_to_last_save_s <= cost.stages[0].forward_s);
}

TEST_CASE("every plan of a measured chain peaks on the device as predicted", "[device][plan]") {
  const Tensor x = leaf_on(0);
  const std::vector<Stage> stages = sines({2, 1, 3, 2, 4});
  const ChainCost cost = remat::measure(stages, x, {.repeats = 1});
  const remat::Frontier frontier = remat::solve(cost);
  const Step plain = step(Plan(6), stages, x);
  CHECK(plain.peak_bytes == (12 + 2) * bytes + 8);  // of the loss and its gradient
  REQUIRE(frontier.points().size() >= 4);
  for (const remat::FrontierPoint& point : frontier.points()) {
    const Plan plan = frontier.plan(point.bytes);
    const Step done = step(plan, stages, x);
    INFO(plan.to_string());
    CHECK(done.peak_bytes == point.bytes);
    require_bit_equal({done.gradient}, {plain.gradient});
  }
}

TEST_CASE("plans of stages in two precisions peak on the device as predicted", "[device][plan]") {
  // Backward casts its gradient before it first reads, and a recompute ends before the output is
  // cast.
  const Stage narrow = [](const Tensor& y) {
    return y + y.to(at::kBFloat16).sin().sin().to(at::kFloat);
  };
  const std::vector<Stage> stages{narrow, narrow, narrow,
                                  [](const Tensor& y) { return y.sin().sum(); }};
  const Tensor x = leaf_on(0);
  const ChainCost cost = remat::measure(stages, x, {.repeats = 1});
  CHECK(cost.stages[1].first_read_tmp_bytes == bytes / 2);
  const Step plain = step(Plan(4), stages, x);
  for (const char* const text : {"[1 2 3 4]", "[ck[1] ck[2] ck[3] 4]", "[ck[1 2] ck[3] 4]",
                                 "[ck[1 2 3] 4]", "[ck[ck[1] 2] 3 4]", "[ck[ck[ck[1] 2] 3] 4]"}) {
    INFO(text);
    const Plan plan = Plan::parse(text);
    const Step done = step(plan, stages, x);
    const int64_t predicted = remat::simulate(cost, plan).peak_bytes;
    CHECK(done.peak_bytes <= predicted);
    // The plan charges two inputs that no stage saves.
    CHECK(done.peak_bytes >= predicted - 2 * bytes);
    require_bit_equal({done.gradient}, {plain.gradient});
  }
}

TEST_CASE("a plan that moves sends a device's values to the CPU or a file, within its prediction",
          "[device][plan]") {
  const Tensor x = leaf_on(0);
  const std::vector<Stage> stages = sines({2, 1, 3, 2, 4});
  const Step plain = step(Plan(6), stages, x);
  const Folder folder;
  for (const std::string& directory : {std::string(), folder.path()}) {
    INFO("directory \"" << directory << "\"");
    const remat::MoveOptions moving{.directory = directory, .min_bytes = 0};
    ChainCost cost = remat::measure(stages, x, {.repeats = 1, .moving = moving});
    REQUIRE(cost.moving);
    CHECK(cost.stages[2].movable_bytes == 2 * bytes);  // of three saved values, one is the input
    CHECK(cost.stages[2].has_movable_output);
    // The stand-in's copies wait for the host. This makes them fast, so that plans move much.
    cost.moving = remat::MoveCost{.store_s_per_byte = 1e-15, .load_s_per_byte = 1e-15};
    const remat::Frontier frontier = remat::solve(cost);
    int64_t num_moving = 0;
    for (const remat::FrontierPoint& point : frontier.points()) {
      const Plan plan = frontier.plan(point.bytes);
      INFO(plan.to_string());
      num_moving += plan.moved().empty() ? 0 : 1;
      const Step done = step(plan, stages, x, moving);
      CHECK(done.peak_bytes <= point.bytes);
      require_bit_equal({done.gradient}, {plain.gradient});
    }
    CHECK(num_moving > 0);
    CHECK(step(Plan::parse("[1 mv[2] mv[3] mv[4] 5 6]"), stages, x, moving).peak_bytes <
          plain.peak_bytes);
  }
}

TEST_CASE("a plan that moves brings values back beside the backward of the item behind them",
          "[device][plan]") {
  const Tensor x = leaf_on(0);
  int64_t in_backward = 0;
  std::vector<Stage> stages = sines({1, 3});
  stages.insert(stages.end() - 1, Stage([&](const Tensor& y) {
                  const Tensor z = y.sin();
                  z.register_hook([&](const Tensor&) { in_backward = stand_in::live_bytes(); });
                  return z.exp();
                }));
  const auto grown = [&](const char* plan) {
    const Tensor input = x.detach().requires_grad_();
    const Tensor loss = remat::run(Plan::parse(plan), stages, input, {}, {.min_bytes = 0});
    const int64_t before = stand_in::live_bytes();
    loss.backward(at::ones_like(loss));
    return in_backward - before;
  };
  const int64_t without = grown("[1 2 3 4]");
  CHECK(grown("[1 mv[2] 3 4]") - without == 3 * bytes);  // saved by stage 2 and not read yet
}

TEST_CASE("a plan for what a device has free fits, and plain does not", "[device][plan]") {
  struct Small {
    explicit Small(int64_t total) { stand_in::set_total_bytes(total); }
    ~Small() { stand_in::set_total_bytes(stand_in::default_total_bytes); }
  };
  const Tensor x = leaf_on(0);
  const std::vector<Stage> stages = sines({3, 3, 3, 3, 3, 3});
  const ChainCost cost = remat::measure(stages, x, {.repeats = 1});
  const Step plain = step(Plan(7), stages, x);
  stand_in::live_bytes();
  const int64_t live = stand_in::default_total_bytes - remat::free_bytes(stand_in::device(0));
  const Small small(live + 13 * bytes);
  CHECK(remat::free_bytes(stand_in::device(0)) == 13 * bytes);
  const int64_t budget = remat::free_budget(cost, stand_in::device(0));
  CHECK(budget < 13 * bytes);
  CHECK(budget == static_cast<int64_t>(13 * bytes * 0.95 / (1 + cost.rounding)));
  CHECK(remat::free_budget(cost, stand_in::device(0), 0) > budget);
  const Step done = step(remat::solve(cost).plan(budget), stages, x);
  CHECK(done.peak_bytes <= budget);
  require_bit_equal({done.gradient}, {plain.gradient});
  CHECK_THROWS_AS(step(Plan(7), stages, x), c10::OutOfMemoryError);
  stand_in::live_bytes();
}

TEST_CASE("what is free is refused where nobody says it", "[device][plan]") {
  const auto error =
      error_of<remat::CheckpointError>([] { remat::free_bytes(at::Device(at::kCPU)); });
  CHECK(error.kind() == remat::CheckpointError::Kind::Unsupported);
  CHECK_THAT(text_of(error), contains("the free memory of device cpu is not known"));
  {
    const MemoryLimitGuard limit(MemoryMeter().live_bytes() + 5000);
    CHECK(remat::free_bytes(at::Device(at::kCPU)) == 5000);
    const Tensor some = at::empty({1000}, at::kByte);
    CHECK(remat::free_bytes(at::Device(at::kCPU)) == 4000);
  }
  const ChainCost cost{.rounding = -1};
  CHECK_THROWS_AS(remat::free_budget({}, stand_in::device(0), 1), c10::ValueError);
  CHECK_THROWS_AS(remat::free_budget(cost, stand_in::device(0)), c10::ValueError);
}
