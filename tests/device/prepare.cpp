// Recomputing ahead on an accelerator: streams, waits and time, on the stand-in of stand_in.h.

#include "remat/region_handle.h"
#include "tests/device/stand_in.h"
#include "tests/support/far_tensors.h"
#include "tests/support/support.h"

using remat::checkpoint;
using remat::RegionHandle;
using remat::regions_of;

namespace {

constexpr std::chrono::nanoseconds kernel_time{1000};

/// Sets the time of kernels while alive, and begins the streams' timelines.
struct Timed {
  Timed() {
    stand_in::set_work_time(kernel_time);
    stand_in::timeline::restart();
  }
  ~Timed() { stand_in::set_work_time(std::chrono::nanoseconds(0)); }
  Timed& operator=(Timed&&) = delete;
  static int64_t steps() { return stand_in::timeline::end() / kernel_time.count(); }
};

Tensor block(const Tensor& t) { return t.sin().exp().cos().tanh(); }

Tensor far_ones(const Tensor& y) { return at::ones(y.sizes()).to(y.device()); }

}  // namespace

TEST_CASE("a region is prepared on a stream of its own, and a reader waits there",
          "[device][prepare]") {
  const Tensor values = at::randn({8});
  const Tensor x = far_leaf(values);
  const auto handle = std::make_shared<RegionHandle>();
  const Tensor y = checkpoint({.handle = handle}, block, x);
  const c10::Stream before = stand_in::current_stream();
  stand_in::clear_log();
  handle->prepare();
  CHECK(stand_in::current_stream() == before);
  const auto prepared = stand_in::log();
  REQUIRE_FALSE(prepared.empty());
  // The stream of device 0 records the end last. Before, it waited for work so far, and the
  // allocator was told that it uses the input.
  const std::string own = prepared.back().substr(prepared.back().find(' ') + 1);
  CHECK(std::stoll(own) >= 100);
  CHECK(prepared.back() == "record " + own);
  CHECK(std::count(prepared.begin(), prepared.end(), "wait " + own + " for 0") >= 1);
  CHECK(std::count(prepared.begin(), prepared.end(), "use on " + own) == 1);
  stand_in::clear_log();
  const Tensor grad = torch::autograd::grad({y}, {x}, {far_ones(y)})[0];
  const auto log = stand_in::log();
  CHECK(std::count(log.begin(), log.end(), "wait 0 for " + own) >= 1);
  CHECK(std::count(log.begin(), log.end(), "use on 0") >= 1);
  const Tensor near = values.clone().requires_grad_();
  require_same(grad.cpu(), grad_of(block(near), {near})[0]);
}

TEST_CASE("forward's stream waits for prepared tensors that are dropped unread",
          "[device][prepare]") {
  const Tensor x = leaf_on(0, {8});
  const auto handle = std::make_shared<RegionHandle>();
  const Tensor y = checkpoint({.handle = handle}, block, x);
  handle->prepare();
  stand_in::clear_log();
  handle->release();
  const auto log = stand_in::log();
  CHECK_FALSE(log.empty());
  for (const std::string& each : log) CHECK(each.starts_with("wait 0 for 1"));
}

TEST_CASE("a region with a state provider, and work under capture, stay on forward's streams",
          "[device][prepare]") {
  struct Nothing final : remat::StateProvider {
    std::any capture() override { return 0; }
    void restore(const std::any&) override {}
  };
  const bool captures = GENERATE(true, false);
  const Tensor x = leaf_on(0, {8});
  std::optional<remat::StateProviderGuard> guard;
  if (!captures) guard.emplace(std::make_shared<Nothing>());
  const auto handle = std::make_shared<RegionHandle>();
  const Tensor y = checkpoint({.preserve_rng_state = false, .handle = handle}, block, x);
  stand_in::clear_log();
  if (captures) stand_in::set_capturing(true);
  handle->prepare();
  stand_in::set_capturing(false);
  for (const std::string& each : stand_in::log()) CHECK(each == "record 0");
}

TEST_CASE("prepare_ahead hides recomputes behind backward", "[device][prepare]") {
  const Tensor values = at::randn({8});
  constexpr int64_t num_regions = 8;
  std::map<int64_t, int64_t> steps;
  Tensor expected;
  for (const int64_t ahead : {0, 1, 2}) {
    const Tensor x = far_leaf(values);
    Tensor y = x;
    for (int64_t i = 0; i < num_regions; ++i)
      y = checkpoint({.early_stop = false, .prepare_ahead = ahead}, block, y);
    const Tensor ones = far_ones(y);
    const remat::Counters before = remat::counters();
    const Timed timed;
    const Tensor grad = torch::autograd::grad({y}, {x}, {ones})[0];
    steps[ahead] = Timed::steps();
    CHECK(remat::counters().recomputes - before.recomputes == num_regions);
    if (expected.defined()) require_same(grad, expected);
    expected = grad;
  }
  // A recompute takes four steps. All but the first run beside the backward of a later region.
  CAPTURE(steps);
  CHECK(steps[0] - steps[1] == (num_regions - 1) * 4);
  CHECK(steps[2] <= steps[1]);
}

TEST_CASE("a pipeline of two devices prepares the first part while the second one works",
          "[device][prepare]") {
  const Tensor values = at::randn({8});
  const auto run = [&](bool ahead) {
    const Tensor x = far_leaf(values, 0);
    const Tensor middle = checkpoint({.name = "first", .early_stop = false}, block, x);
    const Tensor y = checkpoint({.name = "second", .early_stop = false}, block,
                                middle.to(stand_in::device(1), /*non_blocking=*/true));
    const Tensor ones = far_ones(y);
    const Timed timed;
    if (ahead)
      for (const RegionHandle& each : regions_of(y))
        if (each.name() == "first") each.prepare();
    const Tensor grad = torch::autograd::grad({y}, {x}, {ones})[0];
    return std::pair(grad, Timed::steps());
  };
  const auto [plain, steps] = run(false);
  const auto [grad, steps_ahead] = run(true);
  require_same(grad, plain);
  CHECK(steps - steps_ahead == 4);
}
