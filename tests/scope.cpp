// The guards of scope.h and the queries about the region that runs now.

#include <memory>
#include <thread>

#include "tests/support/support.h"

using remat::checkpoint;
using remat::DebugGuard;
using remat::DisableCheckpointGuard;
using remat::EarlyStopGuard;
using remat::Phase;

namespace {

template <class Guard>
constexpr bool stays_in_place =
    !std::is_copy_constructible_v<Guard> && !std::is_move_constructible_v<Guard> &&
    !std::is_copy_assignable_v<Guard> && !std::is_move_assignable_v<Guard>;
static_assert(stays_in_place<EarlyStopGuard>);
static_assert(stays_in_place<DebugGuard>);
static_assert(stays_in_place<DisableCheckpointGuard>);
static_assert(stays_in_place<remat::SavedTensorHooksGuard>);
static_assert(stays_in_place<remat::DisableSavedTensorHooksGuard>);
static_assert(!std::is_convertible_v<bool, EarlyStopGuard>);

// clone(cos(sin x)): the tail saves nothing, so an early stop never reaches it. Large enough that
// a stop is worth its price.
Tensor region_with_tail(Calls& tail, const remat::CheckpointOptions& options, const Tensor& x) {
  return checkpoint(
      options,
      [&tail](const Tensor& t) {
        const Tensor y = t.sin().cos();
        tail();
        return y.clone();
      },
      x);
}

}  // namespace

TEST_CASE("early stop: the innermost guard beats the outer, any guard beats the option",
          "[scope][rule-5]") {
  const int64_t size = GENERATE(4, 100'000);
  const Tensor x = leaf({size});
  const Tensor expected = grad_of(x.sin().cos().clone(), {x})[0];
  const auto tails = [&](bool option, auto... guards) {
    Calls tail;
    Tensor y;
    const Counted done;
    {
      std::vector<std::unique_ptr<EarlyStopGuard>> alive;
      (alive.push_back(std::make_unique<EarlyStopGuard>(guards)), ...);
      y = region_with_tail(tail, {.early_stop = option}, x);
      while (!alive.empty()) alive.pop_back();  // inner ones first
    }
    CHECK(tail.count() == 1);
    CHECK(at::equal(grad_of(y, {x})[0], expected));
    CHECK(done.now().recomputes == 1);
    CHECK(done.now().early_stops == (tail.count() == 1 ? 1 : 0));
    return tail.count();
  };
  CHECK(tails(true) == 1);
  CHECK(tails(false) == 2);
  CHECK(tails(true, false) == 2);
  CHECK(tails(true, true) == 1);
  CHECK(tails(false, false, true) == 1);
  CHECK(tails(true, false) == 2);
  CHECK(tails(false, true) == 1);
  CHECK(tails(true, true, false) == 2);
}

TEST_CASE("early stop is read when the region runs forward", "[scope][rule-5]") {
  const Tensor x = leaf({100'000});
  Calls tail;
  const Tensor y = region_with_tail(tail, {}, x);
  {
    const EarlyStopGuard guard(false);
    y.sum().backward();
  }
  CHECK(tail.count() == 1);
}

TEST_CASE("a guard in one thread does not change regions run in another", "[scope][threads]") {
  const EarlyStopGuard here(false);
  int64_t there_tails = 0;
  std::thread([&] {
    Calls tail;
    const Tensor x = leaf({100'000});
    region_with_tail(tail, {}, x).sum().backward();
    there_tails = tail.count();
  }).join();
  CHECK(there_tails == 1);

  Calls tail;
  const Tensor x = leaf({100'000});
  region_with_tail(tail, {}, x).sum().backward();
  CHECK(tail.count() == 2);
}

TEST_CASE("a recompute on another thread uses the forward's guards, not that thread's",
          "[scope][threads]") {
  const Tensor x = leaf({100'000});
  Calls tail;
  SECTION("early stop") {
    Tensor y;
    {
      const EarlyStopGuard guard(false);
      y = region_with_tail(tail, {}, x);
    }
    std::thread([&] {
      const EarlyStopGuard other(true);
      y.sum().backward();
    }).join();
    CHECK(tail.count() == 2);
  }
  SECTION("debug") {
    const bool forward_debug = GENERATE(true, false);
    Calls runs;
    Tensor y;
    {
      const DebugGuard guard(forward_debug);
      y = checkpoint(
          [&](const Tensor& t) {
            runs();
            return runs.count() == 1 ? t.sin().exp().sin() : t.exp().sin();
          },
          x);
    }
    std::string text;
    std::thread([&] {
      const DebugGuard other(!forward_debug);
      try {
        y.sum().backward();
      } catch (const remat::CheckpointError& error) {
        text = error.what();
      }
    }).join();
    CHECK_THAT(text, contains("A different number of tensors was saved"));
    CHECK((text.find("because CheckpointOptions had `debug = true`") != std::string::npos) ==
          forward_debug);
  }
}

TEST_CASE("regions that a recompute opens have the DebugGuard of the forward", "[scope]") {
  bool differs = false;
  const auto inner = [&](const Tensor& t) {
    const Tensor y = t.sin();
    const bool is_again = remat::current_phase().phase == Phase::Recompute;
    return (differs && is_again ? y.narrow(0, 0, 2) : y).exp();
  };
  const auto f = [&](const Tensor& x) {
    const Tensor a = x * 1;
    const Tensor slope = grad_of(checkpoint({.name = "inner"}, inner, a), {a})[0];
    return (slope * x).exp();
  };
  const Tensor x = leaf({4});
  Tensor y;
  {
    const DebugGuard debug(true);
    y = checkpoint(f, x);
  }
  differs = true;
  const auto error = error_of<remat::CheckpointError>([&] { grad_of(y, {x}); });
  REQUIRE(error.mismatches().size() == 1);
  CHECK_THAT(error.mismatches()[0].forward_op, contains("aten::exp"));
  CHECK_THAT(error.what(), contains("Operators of the forward"));
}

TEST_CASE("guards destroyed out of order end their own effect only", "[scope][hooks]") {
  const Tensor x = leaf({100'000});
  SECTION("early stop") {
    auto outer = std::make_unique<EarlyStopGuard>(false);
    auto inner = std::make_unique<EarlyStopGuard>(true);
    outer.reset();
    Calls tail;
    region_with_tail(tail, {.early_stop = false}, x).sum().backward();
    CHECK(tail.count() == 1);  // the inner guard is still there
    inner.reset();
    tail.reset();
    region_with_tail(tail, {.early_stop = false}, x).sum().backward();
    CHECK(tail.count() == 2);
  }
  SECTION("hooks") {
    Calls outer_packs, inner_packs;
    const auto identity = [](const Tensor& t) { return t; };
    auto outer =
        std::make_unique<remat::SavedTensorHooksGuard>(counted(outer_packs, identity), identity);
    auto inner =
        std::make_unique<remat::SavedTensorHooksGuard>(counted(inner_packs, identity), identity);
    outer.reset();
    x.sin();
    CHECK(inner_packs.count() == 1);
    inner.reset();
    x.sin();
    CHECK(inner_packs.count() == 1);
    CHECK(outer_packs.count() == 0);
  }
  SECTION("guards of different kinds, in every order") {
    const auto identity = [](const Tensor& t) { return t; };
    const std::vector<int> order =
        GENERATE(std::vector<int>{0, 1, 2}, std::vector<int>{0, 2, 1}, std::vector<int>{1, 0, 2},
                 std::vector<int>{1, 2, 0}, std::vector<int>{2, 0, 1}, std::vector<int>{2, 1, 0});
    auto hooks = std::make_unique<remat::SavedTensorHooksGuard>(identity, identity);
    auto debug = std::make_unique<DebugGuard>(true);
    auto plain = std::make_unique<DisableCheckpointGuard>();
    for (const int which : order) {
      if (which == 0) hooks.reset();
      if (which == 1) debug.reset();
      if (which == 2) plain.reset();
      const Counted done;
      checkpoint([](const Tensor& t) { return t.sin(); }, x).sum().backward();
      CHECK(done.now().frames_created == (plain ? 0 : 1));
    }
  }
  SECTION("a guard destroyed on another thread") {
    Calls packs;
    const auto identity = [](const Tensor& t) { return t; };
    auto guard = std::make_unique<remat::SavedTensorHooksGuard>(counted(packs, identity), identity);
    x.sin();
    CHECK(packs.count() == 1);
    std::thread([&] { guard.reset(); }).join();
    x.sin();
    CHECK(packs.count() == 1);
  }
}

TEST_CASE("regions inside DisableCheckpointGuard run plainly", "[scope]") {
  const Tensor weight = leaf({2, 2}), rows = at::randn({4, 2});
  Calls calls;
  const auto run_rows = [&] {
    return checkpoint(
        [&](const Tensor& t) {
          calls();
          return t.mm(weight).sin();
        },
        rows);
  };
  run_rows().sum().backward();
  CHECK(calls.count() == 2);
  const Tensor expected = weight.grad().clone();
  weight.mutable_grad() = Tensor();

  calls.reset();
  const Counted done;
  {
    const DisableCheckpointGuard guard;
    const Tensor y = run_rows();
    CHECK_FALSE(remat::is_checkpointing());
    y.sum().backward();
  }
  CHECK(calls.count() == 1);
  CHECK(done.now().frames_created == 0);
  CHECK(at::equal(weight.grad(), expected));

  calls.reset();
  run_rows().sum().backward();
  CHECK(calls.count() == 2);
}

TEST_CASE("DisableCheckpointGuard covers nested regions, also in a recompute", "[scope]") {
  const Tensor x = leaf({3});
  Calls inner_calls;
  const auto inner = counted(inner_calls, [](const Tensor& t) { return t.sin().exp(); });
  const Counted done;
  const Tensor y = checkpoint(
      [&](const Tensor& t) {
        const DisableCheckpointGuard guard;
        return checkpoint(inner, t).sin();
      },
      x);
  y.sum().backward();
  CHECK(inner_calls.count() == 2);
  CHECK(done.now().frames_created == 1);
  CHECK(done.now().recomputes == 1);
}

TEST_CASE("is_checkpointing and is_recomputing say which pass runs", "[scope]") {
  const Tensor x = leaf({2});
  using Answers = std::pair<bool, bool>;
  std::vector<Answers> seen;
  const auto ask = [&] { seen.emplace_back(remat::is_checkpointing(), remat::is_recomputing()); };
  const auto module = [&](const Tensor& t) {
    ask();
    return t.sin();
  };
  SECTION("one region") {
    checkpoint(module, x).sum().backward();
    CHECK((seen == std::vector<Answers>{{true, false}, {false, true}}));
    ask();
    module(x);
    CHECK((std::vector<Answers>(seen.begin() + 2, seen.end()) ==
           std::vector<Answers>{{false, false}, {false, false}}));
  }
  SECTION("the first run of a region in a recompute is recomputing") {
    checkpoint([&](const Tensor& t) { return checkpoint(module, t.exp()).cos(); }, x)
        .sum()
        .backward();
    REQUIRE(seen.size() == 3);
    CHECK((seen == std::vector<Answers>{{true, false}, {false, true}, {false, true}}));
  }
  SECTION("after an exception neither") {
    CHECK_THROWS_AS(checkpoint(
                        [](const Tensor& t) -> Tensor {
                          t.sin();
                          throw std::runtime_error("foo");
                        },
                        x),
                    std::runtime_error);
    ask();
    CHECK((seen == std::vector<Answers>{{false, false}}));
  }
}

TEST_CASE("a function may open regions of itself recursively", "[scope]") {
  const Tensor x = leaf({3});
  Calls calls;
  std::function<Tensor(const Tensor&, int)> descend = [&](const Tensor& t, int depth) -> Tensor {
    calls();
    const Tensor y = t.sin();
    return depth == 0 ? y : checkpoint(descend, y, depth - 1) * y;
  };
  std::function<Tensor(const Tensor&, int)> plain = [&](const Tensor& t, int depth) -> Tensor {
    const Tensor y = t.sin();
    return depth == 0 ? y : plain(y, depth - 1) * y;
  };
  const Counted done;
  require_same_grads([&](const Tensor& t) { return plain(t, 4); },
                     [&](const Tensor& t) { return checkpoint(descend, t, 4); }, x);
  CHECK(done.now().recomputes == 5);
  CHECK(calls.count() >= 10);
}

TEST_CASE("current_phase describes the innermost frame in both passes", "[scope]") {
  const Tensor x = leaf({2});
  std::vector<remat::PhaseInfo> outer, inner;
  const auto region = [&](const Tensor& t) {
    return checkpoint(
        {.name = "outer"},
        [&](const Tensor& u) {
          outer.push_back(remat::current_phase());
          const Tensor v = checkpoint(
              {.name = "inner"},
              [&](const Tensor& w) {
                inner.push_back(remat::current_phase());
                return w.sin();
              },
              u.exp());
          CHECK(remat::current_phase().name == "outer");
          return v.cos();
        },
        t);
  };
  const auto check = [](const remat::PhaseInfo& info, Phase phase, int64_t depth,
                        const std::string& name) {
    CHECK(info.phase == phase);
    CHECK(info.depth == depth);
    CHECK(info.name == name);
    CHECK(info.frame_id >= 0);
  };
  {
    const Tensor y = region(x);
    REQUIRE(outer.size() == 1);
    REQUIRE(inner.size() == 1);
    check(outer[0], Phase::Forward, 1, "outer");
    check(inner[0], Phase::Forward, 2, "inner");
    CHECK(inner[0].frame_id != outer[0].frame_id);
    SECTION("backward on this thread") { y.sum().backward(); }
    SECTION("backward on another thread") {
      std::thread([&] { y.sum().backward(); }).join();
    }
  }
  REQUIRE(outer.size() == 2);
  check(outer[1], Phase::Recompute, 1, "outer");
  CHECK(outer[1].frame_id == outer[0].frame_id);
  // The frame that the outer recompute opened runs forward; the first inner frame is recomputed.
  REQUIRE(inner.size() == 3);
  check(inner[1], Phase::Forward, 2, "inner");
  check(inner[2], Phase::Recompute, 2, "inner");

  const remat::PhaseInfo outside = remat::current_phase();
  CHECK(outside.phase == Phase::None);
  CHECK(outside.depth == 0);
  CHECK(outside.name.empty());
}

TEST_CASE("grad mode off and DisableCheckpointGuard create no frame and warn about nothing",
          "[scope]") {
  struct Counting : c10::WarningHandler {
    int count = 0;
    void process(const c10::Warning&) override { ++count; }
  } warnings;
  c10::WarningUtils::WarningHandlerGuard handler(&warnings);
  const Tensor x = leaf({2});
  const Counted done;
  {
    at::NoGradGuard no_grad;
    checkpoint([](const Tensor& t) { return t.sin(); }, x);
  }
  {
    const DisableCheckpointGuard guard;
    checkpoint([](const Tensor& t) { return t.sin(); }, x).sum().backward();
  }
  CHECK(done.now().frames_created == 0);
  CHECK(warnings.count == 0);
}

TEST_CASE("is_checkpointing_disabled says whether a guard disables regions", "[scope]") {
  CHECK_FALSE(remat::is_checkpointing_disabled());
  {
    const remat::DisableCheckpointGuard off;
    CHECK(remat::is_checkpointing_disabled());
    const Tensor x = leaf({3});
    checkpoint(
        [](const Tensor& t) {
          CHECK(remat::is_checkpointing_disabled());
          return t.sin();
        },
        x);
  }
  CHECK_FALSE(remat::is_checkpointing_disabled());
}
