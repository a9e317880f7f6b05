// Rule 3: a recompute runs as if no frame and no caller's scope were active; nested regions open
// anew.

#include <thread>

#include "tests/support/support.h"

namespace {

TEST_CASE("a recompute inside another region's run gives that region nothing", "[rule-3]") {
  const Tensor a = leaf({3}), x = leaf({3});
  Calls first_calls, second_calls;
  const Tensor inner_graph =
      remat::checkpoint(counted(first_calls, [](const Tensor& t) { return t.sin().exp(); }), a);
  auto second = counted(second_calls, [&](const Tensor& t) {
    const Tensor g = grad_of(inner_graph, {a}, {.retain_graph = true})[0];
    return (t * g).sin();
  });
  const Tensor plain_gradient = grad_of(a.sin().exp(), {a})[0];
  const Tensors plain = grad_of((x * plain_gradient).sin(), {x});

  Counted done;
  const Tensor y = remat::checkpoint(second, x);
  CHECK(done.now().recomputes == 1);       // of the first region
  CHECK(done.now().tensors_dropped == 2);  // the factor g and the operand of sin, nothing else
  require_bit_equal(grad_of(y, {x}), plain);
  CHECK(second_calls.count() == 2);
  CHECK(first_calls.count() == 3);  // forward, and once in each run of the second region
  CHECK(done.now().tensors_dropped == 2);
}

TEST_CASE("a nested region met in a recompute inside another region opens a frame of its own",
          "[rule-3]") {
  const Tensor a = leaf({3}), x = leaf({3});
  const Tensor first = remat::checkpoint(
      [](const Tensor& t) {
        return remat::checkpoint([](const Tensor& u) { return u.exp(); }, t.sin()).cos();
      },
      a);
  Counted done;
  const Tensor y = remat::checkpoint(
      [&](const Tensor& t) { return t * grad_of(first, {a}, {.retain_graph = true})[0]; }, x);
  CHECK(done.now().frames_created == 2);   // the region itself, and the nested one in the recompute
  CHECK(done.now().recomputes == 2);       // outer and nested one
  CHECK(done.now().tensors_dropped == 2);  // the factor; exp's result in the nested first run
  require_bit_equal(grad_of(y, {x}), grad_of(a.sin().exp().cos(), {a}));
}

TEST_CASE("frames met in a recompute die with it", "[rule-3][rule-13]") {
  const Tensor x = leaf({3});
  std::vector<int64_t> alive;
  const Tensor y = remat::checkpoint(
      [&](const Tensor& t) {
        const Tensor h = remat::checkpoint([](const Tensor& u) { return u.exp().sin(); }, t.sin());
        alive.push_back(remat::counters().frames_alive);
        return h.cos();
      },
      x);
  const int64_t before = remat::counters().frames_alive;
  grad_of(y, {x}, {.retain_graph = true});
  CHECK(remat::counters().frames_alive == before);
  CHECK(alive == std::vector<int64_t>{2, 3});
}

TEST_CASE("hooks open around a backward see nothing of its recomputes", "[rule-3][rule-16]") {
  const bool create_graph = GENERATE(true, false);
  CAPTURE(create_graph);
  const Tensor x = leaf({3});
  Calls calls;
  auto f = counted(calls, [](const Tensor& t) {
    return remat::checkpoint([](const Tensor& u) { return u.sin().exp(); }, t.cos()).sin();
  });
  const Tensors plain = grad_of(f(x), {x});
  const Tensor y = remat::checkpoint(f, x);
  std::vector<const void*> packed;
  Tensors grads;
  Counted done;
  {
    const remat::SavedTensorHooksGuard hooks(
        [&](const Tensor& t) {
          packed.push_back(t.grad_fn().get());
          return t;
        },
        [](const Tensor& t) { return t; });
    grads = grad_of(y, {x}, {.retain_graph = true, .create_graph = create_graph});
  }
  CHECK(done.now().recomputes == 2);
  // With create_graph the backward itself saves tensors, and those do go through the hooks.
  if (!create_graph) CHECK(packed.empty());
  require_bit_equal(Tensors{grads[0].detach()}, plain);
}

TEST_CASE("a guard that turns checkpoints off around a backward does not change the recompute",
          "[rule-3][rule-10]") {
  const Tensor x = leaf({3});
  auto f = [](const Tensor& t) {
    return remat::checkpoint([](const Tensor& u) { return u.exp().sin(); }, t.sin()).cos();
  };
  const Tensors plain = grad_of(x.sin().exp().sin().cos(), {x});
  const Tensor y = remat::checkpoint(f, x);
  const remat::DisableCheckpointGuard off;
  Counted done;
  require_bit_equal(grad_of(y, {x}), plain);
  CHECK(done.now().recomputes == 2);
  CHECK(done.now().frames_created == 1);  // the nested one in the outer recompute
}

TEST_CASE("a guard that turned checkpoints off inside the function does so in the recompute too",
          "[rule-3]") {
  const Tensor x = leaf({3});
  Calls outer_calls, inner_calls;
  Counted done;
  const Tensor y = remat::checkpoint(
      counted(outer_calls,
              [&](const Tensor& t) {
                const remat::DisableCheckpointGuard off;
                return remat::checkpoint(
                           counted(inner_calls, [](const Tensor& u) { return u.exp(); }), t.sin())
                    .cos();
              }),
      x);
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin().exp().cos(), {x}));
  CHECK(done.now().frames_created == 1);
  CHECK(outer_calls.count() == 2);
  CHECK(inner_calls.count() == 2);
}

TEST_CASE("early stop follows the guards around forward, not those around backward",
          "[rule-3][rule-5]") {
  const Tensor x = leaf({2});
  Calls tail;
  auto f = [&](const Tensor& t) {
    const Tensor h = t.sin().cos();
    tail();
    return h.clone();
  };
  SECTION("off in forward") {
    Tensor y;
    {
      const remat::EarlyStopGuard off(false);
      y = remat::checkpoint(f, x);
    }
    const remat::EarlyStopGuard on(true);
    require_bit_equal(grad_of(y, {x}), grad_of(x.sin().cos(), {x}));
    CHECK(tail.count() == 2);
  }
  SECTION("on in forward") {
    const Tensor y = remat::checkpoint(f, x);
    const remat::EarlyStopGuard off(false);
    require_bit_equal(grad_of(y, {x}), grad_of(x.sin().cos(), {x}));
    CHECK(tail.count() == 1);
  }
  SECTION("off in forward, and backward in another thread") {
    Tensor y;
    {
      const remat::EarlyStopGuard off(false);
      y = remat::checkpoint(f, x);
    }
    Tensors grads;
    std::thread([&] { grads = grad_of(y, {x}); }).join();
    require_bit_equal(grads, grad_of(x.sin().cos(), {x}));
    CHECK(tail.count() == 2);
  }
}

TEST_CASE("debug follows the guards around forward, also on another thread", "[rule-3]") {
  const Tensor x = leaf({1});
  Calls calls;
  auto f = [&](const Tensor& t) {
    calls();
    return calls.count() == 1 ? t.sin().exp() : t.sin() * at::ones({2});
  };
  auto error_of_backward = [&](const Tensor& y) {
    std::string text;
    std::thread([&] {
      try {
        grad_of(y, {x});
      } catch (const remat::CheckpointError& e) {
        text = e.what_without_backtrace();
      }
    }).join();
    return text;
  };
  const std::string paragraph =
      "You are seeing this error because CheckpointOptions had `debug = true`";
  Tensor y;
  SECTION("on in forward") {
    {
      const remat::DebugGuard on(true);
      y = remat::checkpoint(f, x);
    }
    CHECK_THAT(error_of_backward(y), contains(paragraph));
  }
  SECTION("on around backward only") {
    y = remat::checkpoint(f, x);
    const remat::DebugGuard on(true);
    const std::string text =
        error_of<remat::CheckpointError>([&] { grad_of(y, {x}); }).what_without_backtrace();
    CHECK_THAT(text, contains("have different metadata"));
    CHECK_THAT(text, !contains(paragraph));
  }
}

TEST_CASE("an early-stop guard in one thread does not change regions run in another", "[rule-3]") {
  Calls tail;
  auto f = [&](const Tensor& t) {
    const Tensor h = t.sin().cos();
    tail();
    return h.clone();
  };
  const remat::EarlyStopGuard off(false);
  std::thread([&] {
    const Tensor x = at::ones({2}).requires_grad_();
    grad_of(remat::checkpoint(f, x), {x});
  }).join();
  CHECK(tail.count() == 1);
  const Tensor x = leaf({2});
  grad_of(remat::checkpoint(f, x), {x});
  CHECK(tail.count() == 3);
}

TEST_CASE("inside a recompute the phase is the frame's own, whatever surrounds the backward",
          "[rule-3]") {
  std::vector<remat::PhaseInfo> seen;
  std::vector<std::pair<bool, bool>> flags;
  auto note = [&] {
    seen.push_back(remat::current_phase());
    flags.emplace_back(remat::is_checkpointing(), remat::is_recomputing());
  };
  const Tensor a = leaf({2}), x = leaf({2});
  const Tensor first = remat::checkpoint(
      {.name = "outer"},
      [&](const Tensor& t) {
        note();
        return remat::checkpoint(
            {.name = "inner"},
            [&](const Tensor& u) {
              note();
              return u.sin();
            },
            t * 2);
      },
      a);
  auto backward = [&] { return grad_of(first, {a})[0]; };
  SECTION("backward at top level") { backward(); }
  SECTION("backward inside another region") {
    remat::checkpoint({.name = "other"}, [&](const Tensor& t) { return t * backward(); }, x);
  }
  SECTION("backward on another thread") {
    std::thread([&] { backward(); }).join();
  }
  // forward outer, inner; outer recompute: outer (inner stopped at its input); inner recompute.
  REQUIRE(seen.size() >= 4);
  const remat::PhaseInfo outer = seen[0], inner = seen[1], outer_again = seen[2],
                         inner_again = seen.back();
  CHECK(outer.phase == remat::Phase::Forward);
  CHECK(outer.depth == 1);
  CHECK(inner.phase == remat::Phase::Forward);
  CHECK(inner.depth == 2);
  CHECK(inner.frame_id != outer.frame_id);
  CHECK(outer_again.phase == remat::Phase::Recompute);
  CHECK(outer_again.frame_id == outer.frame_id);
  CHECK(outer_again.depth == 1);
  CHECK(outer_again.name == "outer");
  CHECK(inner_again.phase == remat::Phase::Recompute);
  CHECK(inner_again.frame_id == inner.frame_id);
  CHECK(inner_again.depth == 2);
  CHECK(inner_again.name == "inner");
  CHECK(flags[0] == std::pair(true, false));
  CHECK(flags[1] == std::pair(true, false));
  for (size_t i = 2; i < flags.size(); ++i) CHECK(flags[i] == std::pair(false, true));
  const remat::PhaseInfo now = remat::current_phase();
  CHECK(now.phase == remat::Phase::None);
  CHECK(now.depth == 0);
}

TEST_CASE("hooks forbidden around a backward: the recompute works or says so", "[rule-3]") {
  const Tensor x = leaf({2});
  const Tensor y = remat::checkpoint([](const Tensor& t) { return t.sin().exp(); }, x);
  Tensors grads;
  {
    const remat::DisableSavedTensorHooksGuard forbid("no hooks here");
    try {
      grads = grad_of(y, {x}, {.retain_graph = true});
    } catch (const c10::Error& e) {
      CHECK_THAT(text_of(e), contains("no hooks here"));
    }
  }
  if (!grads.empty()) require_bit_equal(grads, grad_of(x.sin().exp(), {x}));
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin().exp(), {x}));
}

}  // namespace
