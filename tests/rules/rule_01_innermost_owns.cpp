// Rule 1: a saved tensor belongs to the innermost active frame, which keeps a slot and drops it.

#include "tests/support/sizes.h"
#include "tests/support/support.h"

namespace {

TEST_CASE("what a region saves is dropped, and only its result stays", "[rule-1]") {
  const Tensor x = leaf({tensor_side, tensor_side});
  auto f = [](const Tensor& t) { return t.sin().sin().sin(); };
  {
    LiveBytes bytes;
    const Tensor plain = f(x);
    REQUIRE(bytes.held() == 3 * tensor_bytes);
  }
  Counted done;
  LiveBytes bytes;
  const Tensor y = remat::checkpoint(f, x);
  CHECK(bytes.held() == tensor_bytes);
  CHECK(done.now().tensors_dropped == 3);
  CHECK(done.now().frames_created == 1);
  CHECK(remat::counters().frames_alive == 1);
}

TEST_CASE("a tensor saved in nested regions belongs to the innermost one", "[rule-1]") {
  Calls outer_calls, inner_calls;
  auto inner = counted(inner_calls, [](const Tensor& t) { return t.exp(); });
  auto outer = counted(outer_calls,
                       [&](const Tensor& t) { return remat::checkpoint(inner, t.sin()).cos(); });
  const Tensor x = leaf({3});
  const Tensors plain = grad_of(x.sin().exp().cos(), {x});

  Counted done;
  const Tensor y = remat::checkpoint(outer, x);
  CHECK(done.now().frames_created == 2);
  // The outer region saves the operands of sin and cos, and the inner region's input. Of the inner
  // one: the result of exp.
  CHECK(done.now().tensors_dropped == 4);

  require_bit_equal(grad_of(y, {x}), plain);
  CHECK(outer_calls.count() == 2);
  CHECK(inner_calls.count() == 3);  // forward, in the outer recompute, in its own
  CHECK(done.now().recomputes == 2);
  CHECK(done.now().frames_created == 3);
  CHECK(done.now().tensors_recomputed == 4);
  CHECK(done.now().tensors_dropped == 5);
}

TEST_CASE("a region at depth d runs d + 1 times and recomputes once", "[rule-1][rule-2]") {
  constexpr int depth = 6;
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const remat::EarlyStopGuard guard(early_stop);
  std::vector<Calls> calls(depth);
  std::function<Tensor(int, const Tensor&, bool)> level = [&](int d, const Tensor& t, bool drop) {
    if (d == depth) return t.clone();
    auto body = [&calls, &level, d, drop](const Tensor& u) {
      calls[static_cast<size_t>(d)]();
      return level(d + 1, u.sin(), drop).cos();
    };
    return drop ? remat::checkpoint(body, t) : body(t);
  };
  const Tensor x = leaf({4});
  const Tensors plain = grad_of(level(0, x, false), {x});
  for (Calls& c : calls) c.reset();

  Counted done;
  const Tensor y = level(0, x, true);
  CHECK(done.now().frames_created == depth);
  require_bit_equal(grad_of(y, {x}), plain);
  CHECK(done.now().recomputes == depth);
  for (int d = 0; d < depth; ++d) CHECK(calls[static_cast<size_t>(d)].count() == d + 2);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

// Five branches, each of which saves exactly one tensor.
Tensors branches(const Tensor& t) { return {t.sin(), t.exp(), t.cos(), t.sigmoid(), t.tanh()}; }

TEST_CASE("slots whose node died inside the region are skipped but keep their position",
          "[rule-1]") {
  const unsigned kept = GENERATE(range(1u, 32u));
  CAPTURE(kept);
  const Tensor x = leaf({5});
  Calls calls;
  auto f = counted(calls, [kept](const Tensor& t) {
    Tensors all = branches(t);  // the nodes of those not summed die when this returns
    Tensor sum;
    for (unsigned i = 0; i < all.size(); ++i) {
      if (kept >> i & 1) sum = sum.defined() ? sum + all[i] : all[i];
    }
    return sum;
  });
  const Tensors plain = grad_of(f(x), {x});
  calls.reset();
  Counted done;
  const Tensor y = remat::checkpoint(f, x);
  CHECK(done.now().tensors_dropped == 5);
  require_bit_equal(grad_of(y, {x}), plain);
  CHECK(calls.count() == 2);
  CHECK(done.now().tensors_recomputed == __builtin_popcount(kept));
}

TEST_CASE("slots whose output was given up after forward are skipped but keep their position",
          "[rule-1]") {
  const unsigned kept = GENERATE(range(1u, 32u));
  CAPTURE(kept);
  const Tensor x = leaf({5});
  auto sum_of_kept = [kept](Tensors all) {
    Tensor sum;
    for (unsigned i = 0; i < all.size(); ++i) {
      if (kept >> i & 1) sum = sum.defined() ? sum + all[i] : all[i];
    }
    return sum;
  };
  const Tensors plain = grad_of(sum_of_kept(branches(x)), {x});
  Calls calls;
  Counted done;
  const Tensor y = sum_of_kept(remat::checkpoint(counted(calls, branches), x));
  require_bit_equal(grad_of(y, {x}), plain);
  CHECK(calls.count() == 2);
  CHECK(done.now().recomputes == 1);
  CHECK(done.now().tensors_recomputed == __builtin_popcount(kept));
}

TEST_CASE("a recompute runs no further than the last slot that is still alive",
          "[rule-1][rule-5]") {
  const Tensor x = leaf({tensor_side, tensor_side});
  const Tensors plain = grad_of(x.sin(), {x});
  KernelCounter kernels;
  auto [sine, exponential] = remat::checkpoint(
      [](const Tensor& t) {
        const Tensor first = t.sin();
        return std::pair(first, t.exp().cos());
      },
      x);
  REQUIRE(kernels.count("exp") == 1);
  exponential = Tensor();
  Counted done;
  require_bit_equal(grad_of(sine, {x}), plain);
  CHECK(kernels.count("exp") == 1);
  CHECK(kernels.count("cos") == 2);  // in forward, and as the derivative of sin
  CHECK(done.now().early_stops == 1);
}

TEST_CASE("a region whose slots all died is gone", "[rule-1][rule-13]") {
  const Tensor x = leaf({tensor_side, tensor_side});
  Calls calls;
  Tensor y = remat::checkpoint(counted(calls, [](const Tensor& t) { return t.sin() + t; }), x);
  REQUIRE(remat::counters().frames_alive == 1);
  SECTION("with the graph") {
    y = Tensor();
    CHECK(remat::counters().frames_alive == 0);
  }
  SECTION("by a backward that frees the graph, while the output still lives") {
    y.sum().backward();
    CHECK(remat::counters().frames_alive == 0);
    CHECK(calls.count() == 2);
  }
  SECTION("by a backward that retains the graph it does not die") {
    y.sum().backward({}, /*retain_graph=*/true);
    CHECK(remat::counters().frames_alive == 1);
  }
}

TEST_CASE("a region that saves nothing keeps no frame", "[rule-1]") {
  const Tensor x = leaf({2});
  Calls calls;
  Counted done;
  const Tensor y = remat::checkpoint(counted(calls, [](const Tensor& t) { return t + t; }), x);
  CHECK(done.now().frames_created == 1);
  CHECK(remat::counters().frames_alive == 0);
  require_bit_equal(grad_of(y, {x}), {at::full({2}, 2.)});
  CHECK(calls.count() == 1);
  CHECK(done.now().recomputes == 0);
}

TEST_CASE("after a nested region threw and was caught, saves belong to the outer region again",
          "[rule-1][rule-12]") {
  struct Stumble : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  Calls outer_calls, inner_calls;
  auto outer = counted(outer_calls, [&](const Tensor& t) {
    const Tensor h = t.sin();
    try {
      remat::checkpoint(
          [&](const Tensor& u) {
            inner_calls();
            const Tensor v = u.exp();
            if (v.defined()) throw Stumble("inside the inner region");
            return v;
          },
          h);
    } catch (const Stumble&) {
      // the function goes on without the result
    }
    return h.cos();
  });
  const Tensor x = leaf({3});
  const Tensors plain = grad_of(x.sin().cos(), {x});
  Counted done;
  const Tensor y = remat::checkpoint(outer, x);
  CHECK(remat::counters().frames_alive == 1);
  CHECK(done.now().tensors_dropped == 4);
  require_bit_equal(grad_of(y, {x}), plain);
  CHECK(outer_calls.count() == 2);
  CHECK(inner_calls.count() == 2);
  CHECK(done.now().recomputes == 1);
  CHECK(done.now().tensors_recomputed == 2);
}

TEST_CASE("two sibling regions own their saves separately", "[rule-1]") {
  const Tensor x = leaf({3});
  Calls first, second;
  const Tensor a =
      remat::checkpoint(counted(first, [](const Tensor& t) { return t.sin().exp(); }), x);
  const Tensor b =
      remat::checkpoint(counted(second, [](const Tensor& t) { return t.cos().exp(); }), x);
  Counted done;
  require_bit_equal(grad_of(b, {x}), grad_of(x.cos().exp(), {x}));
  CHECK(first.count() == 1);
  CHECK(second.count() == 2);
  require_bit_equal(grad_of(a, {x}), grad_of(x.sin().exp(), {x}));
  CHECK(first.count() == 2);
  CHECK(second.count() == 2);
  CHECK(done.now().recomputes == 2);
}

}  // namespace
