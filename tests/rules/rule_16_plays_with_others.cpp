// Rule 16: user hooks around, between and inside regions, and hooks on single saved tensors beside
// them.

#include "tests/support/saved_hooks.h"
#include "tests/support/saved_tensors.h"
#include "tests/support/sizes.h"

namespace {

// Counting hooks that double what they pack and halve it again: a tensor of their own, exact.
struct Doubling {
  Calls packs, unpacks;
  remat::SavedTensorHooksGuard open() {
    return {counted(packs, doubled), counted(unpacks, halved)};
  }
};

// ---- user hooks around and inside regions ------------------------------------------------------

TEST_CASE("user hooks around a region see its tensor arguments in order, once each", "[rule-16]") {
  const Tensor x = leaf({3}), constant = at::randn({2, 3});
  const Tensor h = x * 2;
  Calls calls, unpacks;
  auto f = counted(calls, [](const Tensor& a, double b, const Tensors& rest) {
    return (a.sin() * rest[0] * b).exp() * rest[1];
  });
  const Tensors plain = grad_of(f(x, 0.5, Tensors{h, constant}), {x}, {.retain_graph = true});
  calls.reset();
  Tensors packed;
  Tensor y;
  {
    const remat::SavedTensorHooksGuard guard(
        [&](const Tensor& t) {
          packed.push_back(t.detach());
          return t * 2;
        },
        counted(unpacks, halved));
    y = remat::checkpoint(f, x, 0.5, Tensors{h, constant});
  }
  require_bit_equal(packed, {x, h, constant});
  CHECK(unpacks.count() == 0);
  for (int i = 1; i <= 2; ++i) {
    require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
    CHECK(packed.size() == 3);
    CHECK(unpacks.count() == 3 * i);
    CHECK(calls.count() == 1 + i);
  }
}

TEST_CASE("a recompute runs on what the user's unpack returns", "[rule-16][rule-2]") {
  const Tensor x = leaf({3});
  Tensors seen;
  Tensor y;
  {
    const remat::SavedTensorHooksGuard guard([](const Tensor& t) { return t * 2; },
                                             [](const Tensor& t) { return t; });
    y = remat::checkpoint(
        [&](const Tensor& t) {
          seen.push_back(t.detach());
          return t.sin();
        },
        x);
  }
  require_bit_equal(grad_of(y, {x}), {(x * 2).cos()});
  require_bit_equal(seen, {x, x * 2});
}

TEST_CASE("user hooks and regions nest in any order, and a tensor goes to the innermost of them",
          "[rule-16][rule-1][rule-2]") {
  const int64_t size = GENERATE(as<int64_t>{}, 2, large);
  const bool early_stop = GENERATE(true, false);
  CAPTURE(size, early_stop);
  const remat::EarlyStopGuard stop(early_stop);
  const int64_t tensor_bytes = size * 4;
  const Tensor x = leaf({size});
  const Tensors plain = grad_of(x.sin().exp().cos().sin().exp().tanh().exp(), {x});
  Doubling a, b, c;
  Calls outer_calls, inner_calls;
  auto inner = counted(inner_calls, [&](const Tensor& t) {
    Tensor h = t.sin();
    {
      const auto guard = c.open();
      h = h.exp();
    }
    return h.tanh();
  });
  auto outer = counted(outer_calls, [&](const Tensor& t) {
    Tensor h = t.exp();
    {
      const auto guard = b.open();
      h = remat::checkpoint(inner, h.cos());
    }
    return h.exp();
  });
  LiveBytes bytes;
  Counted done;
  Tensor y;
  {
    const auto guard = a.open();
    y = remat::checkpoint(outer, x.sin());
  }
  CHECK(a.packs.count() == 2);  // the operand of sin, the outer region's input
  CHECK(b.packs.count() == 2);  // the operand of cos, the inner region's input
  CHECK(c.packs.count() == 1);
  CHECK(done.now().tensors_dropped == 2 + 2);
  CHECK(bytes.held() == (5 + 1) * tensor_bytes);  // what the hooks packed, and the result

  require_bit_equal(grad_of(y, {x}), plain);
  CHECK(outer_calls.count() == 2);
  CHECK(inner_calls.count() == 3);  // forward, in the outer recompute, for its own slots
  CHECK(done.now().recomputes == 2);
  CHECK(done.now().frames_created == 3);
  CHECK(done.now().early_stops == (early_stop && size == large ? 2 : 0));
  // The hooks inside are those of each run again; only what forward packed is ever unpacked.
  CHECK(a.packs.count() == 2);
  CHECK(b.packs.count() == 4);
  CHECK(c.packs.count() == 3);
  CHECK(a.unpacks.count() == 2);
  CHECK(b.unpacks.count() == 2);
  CHECK(c.unpacks.count() == 1);
  CHECK(bytes.held() == tensor_bytes);
}

TEST_CASE("with user hooks between two regions the inner one does not need the outer one",
          "[rule-16][rule-2]") {
  const bool is_between = GENERATE(true, false);
  CAPTURE(is_between);
  const Tensor x = leaf({3});
  Doubling hooks;
  Calls outer_calls, inner_calls;
  auto inner = counted(inner_calls, [](const Tensor& t) { return t.sin().exp(); });
  const Tensor y = remat::checkpoint(counted(outer_calls,
                                             [&](const Tensor& t) {
                                               if (!is_between)
                                                 return remat::checkpoint(inner, t * 2);
                                               const auto guard = hooks.open();
                                               return remat::checkpoint(inner, t * 2);
                                             }),
                                     x);
  Counted done;
  require_bit_equal(grad_of(y, {x}), grad_of((x * 2).sin().exp(), {x}));
  CHECK(outer_calls.count() == (is_between ? 1 : 2));
  CHECK(done.now().recomputes == (is_between ? 1 : 2));
  CHECK(hooks.packs.count() == (is_between ? 1 : 0));
  CHECK(hooks.unpacks.count() == hooks.packs.count());
  CHECK(remat::counters().frames_alive == 0);
}

TEST_CASE("a recompute that ends before the function's own hooks does not open them",
          "[rule-16][rule-5]") {
  const Tensor x = leaf({3});
  Doubling hooks;
  Counted done;
  const Tensor y = remat::checkpoint(
      [&](const Tensor& t) {
        const Tensor h = t.sin();
        const auto guard = hooks.open();
        return h.exp().cos();
      },
      x);
  CHECK(hooks.packs.count() == 2);
  CHECK(done.now().tensors_dropped == 1);
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin().exp().cos(), {x}));
  CHECK(hooks.packs.count() == 2);
  CHECK(hooks.unpacks.count() == 2);
  CHECK(done.now().early_stops == 1);
}

TEST_CASE("hooks that are active only around backward, or around a read, see nothing",
          "[rule-16][rule-3]") {
  const Tensor x = leaf({3});
  Doubling at_forward, at_backward, inside;
  auto f = [&](const Tensor& t) {
    const Tensor h = remat::checkpoint([](const Tensor& u) { return u.sin().exp(); }, t);
    const auto guard = inside.open();
    return h.cos();
  };
  const Tensors plain = grad_of(x.sin().exp().cos().sin(), {x});
  const Tensor last_operand = x.detach().sin().exp().cos();
  Tensor y;
  {
    const auto guard = at_forward.open();
    y = remat::checkpoint(f, x).sin();
  }
  const int64_t packs = at_forward.packs.count();
  CHECK(packs == 2);  // the region's input, the operand of the last sin
  Counted done;
  {
    const auto guard = at_backward.open();
    SECTION("by autograd::grad on a retained graph") {
      for (int i = 0; i < 2; ++i) require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
      CHECK(at_forward.unpacks.count() == 4);
      CHECK(inside.unpacks.count() == 2);
    }
    SECTION("by backward") {
      y.sum().backward();
      require_bit_equal({x.grad()}, plain);
      CHECK(at_forward.unpacks.count() == 2);
      CHECK(inside.unpacks.count() == 1);
    }
    SECTION("by a read") {
      const Tensor saved = read_saved(y, &nodes::SinBackward0::self_);
      require_bit_equal({saved.detach()}, {last_operand});
      CHECK(at_forward.unpacks.count() == 1);
    }
    CHECK(hooks_are_active());
  }
  CHECK(at_backward.packs.count() == 0);
  CHECK(at_backward.unpacks.count() == 0);
  CHECK(at_forward.packs.count() == packs);
  CHECK_FALSE(hooks_are_active());
}

TEST_CASE("with checkpoints disabled user hooks see all that the function saves", "[rule-16]") {
  const Tensor x = leaf({3});
  Doubling hooks;
  Calls calls;
  auto f = counted(calls, [](const Tensor& t) { return t.sin().exp().cos(); });
  Tensor y;
  {
    const auto guard = hooks.open();
    const remat::DisableCheckpointGuard off;
    y = remat::checkpoint(f, x);
  }
  CHECK(hooks.packs.count() == 3);
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin().exp().cos(), {x}));
  CHECK(hooks.unpacks.count() == 3);
  CHECK(calls.count() == 1);
}

// ---- hooks on one saved tensor -----------------------------------------------------------------

void register_doubling(torch::autograd::SavedVariable& saved, Doubling& counts) {
  register_hooks(saved, counted(counts.packs, doubled), counted(counts.unpacks, halved));
}

TEST_CASE("hooks registered on single saved tensors work before and after regions", "[rule-16]") {
  const Tensor x = leaf({3});
  Doubling before_hooks, after_hooks;
  Calls calls;
  const Tensor before = x.sin();
  register_doubling(saved_of(before, &nodes::SinBackward0::self_), before_hooks);
  const Tensor in_region =
      remat::checkpoint(counted(calls, [](const Tensor& t) { return t.exp().cos(); }), before);
  const Tensor after = in_region.sin();
  register_doubling(saved_of(after, &nodes::SinBackward0::self_), after_hooks);
  const Tensors plain = grad_of(x.sin().exp().cos().sin(), {x});
  for (int i = 1; i <= 2; ++i) {
    require_bit_equal(grad_of(after, {x}, {.retain_graph = true}), plain);
    CHECK(before_hooks.unpacks.count() == i);
    CHECK(after_hooks.unpacks.count() == i);
    CHECK(calls.count() == 1 + i);
  }
  CHECK(before_hooks.packs.count() == 1);
  CHECK(after_hooks.packs.count() == 1);
}

TEST_CASE("hooks cannot be registered on a tensor that a region has packed, nor disturb it",
          "[rule-16]") {
  const Tensor x = leaf({3});
  Doubling hooks;
  Calls calls;
  const Tensor y =
      remat::checkpoint(counted(calls, [](const Tensor& t) { return t.exp().cos(); }), x);
  CHECK_THROWS_WITH(register_doubling(saved_of(y, &nodes::CosBackward0::self_), hooks),
                    contains("hooks have already been set"));
  CHECK(hooks.packs.count() == 0);
  CHECK(calls.count() == 1);
  require_bit_equal(grad_of(y, {x}), grad_of(x.exp().cos(), {x}));
  CHECK(calls.count() == 2);
}

}  // namespace
