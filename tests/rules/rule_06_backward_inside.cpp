// Rule 6: gradients taken inside a region, and of regions, to any order.

#include "tests/support/functions.h"
#include "tests/support/maps.h"
#include "tests/support/support.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void require_close(const Tensor& actual, const Tensor& expected) {
  INFO("actual:\n" << actual << "\nexpected:\n" << expected);
  REQUIRE(at::allclose(actual, expected, 1e-9, 1e-12));
}

// ---- create_graph inside a region

TEST_CASE("gradients taken inside regions, and of regions, equal plain ones to third order",
          "[rule-6]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const remat::EarlyStopGuard guard(early_stop);
  const Map f = sin_exp_sin;
  const Tensor x = leaf_of(0.7, at::kDouble);
  const Tensor zeroth = f(x), first = grad(f)(x), second = grad(grad(f))(x);
  struct Case {
    const char* name;
    Map map;
    const Tensor& expected;
  };
  const std::vector<Case> cases{
      {"c(f)", c(f), zeroth},
      {"c(c(f))", c(c(f)), zeroth},
      {"c(c(c(f)))", c(c(c(f))), zeroth},
      {"grad(c(f))", grad(c(f)), first},
      {"grad(c(c(f)))", grad(c(c(f))), first},
      {"c(grad(f))", c(grad(f)), first},
      {"c(grad(c(f)))", c(grad(c(f))), first},
      {"grad(c(grad(f)))", grad(c(grad(f))), second},
      {"c(grad(grad(c(f))))", c(grad(grad(c(f)))), second},
      {"c(grad(c(grad(c(f)))))", c(grad(c(grad(c(f))))), second},
      {"grad(c(grad(c(f))))", grad(c(grad(c(f)))), second},
      {"grad(grad(c(f)))", grad(grad(c(f))), second},
  };
  for (const Case& each : cases) {
    INFO(each.name);
    require_close(each.map(x), each.expected);
    // One order more, through the whole composition.
    const Tensor next = each.expected.is_same(zeroth)  ? first
                        : each.expected.is_same(first) ? second
                                                       : grad(grad(grad(f)))(x);
    require_close(grad(each.map)(x), next);
  }
  const Tensor third = grad(grad(grad(f)))(x);
  require_close(grad(c(grad(grad(c(f)))))(x), third);
  require_close(grad(c(grad(c(grad(c(f))))))(x), third);
  CHECK(remat::counters().frames_alive == 0);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

struct Product : torch::autograd::Function<Product> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    const Tensor y = at::prod(x);
    ctx->save_for_backward({x, y});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    return {grads[0] * saved[1] / saved[0]};
  }
};

TEST_CASE("inside a region a gradient can be taken of a gradient twice", "[rule-6]") {
  const bool custom = GENERATE(true, false);
  const bool early_stop = GENERATE(true, false);
  CAPTURE(custom, early_stop);
  auto product = [custom](const Tensor& t) { return custom ? Product::apply(t) : at::prod(t); };
  const Tensor x = (at::rand({4}, at::kDouble) + 0.5).requires_grad_();
  Calls calls;
  auto f = counted(calls, [&](const Tensor& t) {
    const Tensor g = torch::autograd::grad({product(t)}, {t}, {}, true, true)[0];
    const Tensor once = torch::autograd::grad({g.sum()}, {t}, {}, true, true)[0];
    const Tensor again = torch::autograd::grad({g.sum()}, {t}, {}, true, true)[0];
    REQUIRE(at::equal(once, again));
    return once * g;
  });
  const Tensor y = remat::checkpoint({.early_stop = early_stop}, f, x);
  const Tensor plain = f(x);
  require_bit_equal({y}, {plain});
  require_close(grad_of(y, {x}, {.retain_graph = true})[0], grad_of(plain, {x})[0]);
  require_close(grad_of(y, {x})[0], grad_of(f(x), {x})[0]);
}

TEST_CASE("a second-order gradient through a region of matrices equals plain", "[rule-6]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor x = leaf({4, 5}), w = leaf({5, 3});
  Calls calls;
  auto f = counted(
      calls, [](const Tensor& t, const Tensor& u) { return at::softmax(t.mm(u).tanh(), 1).exp(); });
  auto second_order = [&](const Tensor& y) {
    const Tensors first = grad_of(y, {x, w}, {.create_graph = true});
    return grad_of((first[0].sin().sum() + first[1].exp().sum()), {x, w});
  };
  const Tensors plain = second_order(f(x, w));
  calls.reset();
  const Tensors grads = second_order(remat::checkpoint({.early_stop = early_stop}, f, x, w));
  for (size_t i = 0; i < plain.size(); ++i) REQUIRE(at::allclose(grads[i], plain[i], 1e-5, 1e-7));
  CHECK(calls.count() == 3);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

TEST_CASE("a Function that saves input and output can be differentiated twice inside a region",
          "[rule-6]") {
  struct Square : torch::autograd::Function<Square> {
    static Tensor forward(AutogradContext* ctx, const Tensor& x) {
      const Tensor y = x * x;
      ctx->save_for_backward({x, y});
      return y;
    }
    static variable_list backward(AutogradContext* ctx, variable_list grads) {
      const variable_list saved = ctx->get_saved_variables();
      return {grads[0] * 2 * saved[0] + 0 * saved[1]};
    }
  };
  const Tensor x = leaf({3}, at::kDouble);
  auto f = [](const Tensor& t) {
    const Tensor g = grad_of(Square::apply(t), {t}, {.create_graph = true})[0];
    return grad_of(g, {t}, {.create_graph = true})[0] + g * 0 + t * t;
  };
  const Tensors plain = grad_of(f(x), {x});
  Calls calls;
  const Tensor y = remat::checkpoint(counted(calls, f), x);
  require_close(grad_of(y, {x})[0], plain[0]);
}

// ---- backward inside a region that frees what it used

TEST_CASE("a gradient taken inside a region without retain_graph leaves dead slots behind",
          "[rule-6][rule-1]") {
  const bool early_stop = GENERATE(true, false);
  const bool frees_early = GENERATE(true, false);
  CAPTURE(early_stop, frees_early);
  const Tensor x = leaf({4});
  Calls calls;
  auto f = counted(calls, [frees_early](const Tensor& t) {
    const Tensor before = frees_early ? t : t.tanh();
    const Tensor g = grad_of(t.sin().exp(), {t})[0];  // frees its graph
    return (before * g).cos();
  });
  const Tensors plain = grad_of(f(x), {x});
  calls.reset();
  Counted done;
  const Tensor y = remat::checkpoint({.early_stop = early_stop}, f, x);
  CHECK(done.now().recomputes == 1);  // for the gradient inside the first run
  CHECK(calls.count() == 2);
  require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
  CHECK(done.now().recomputes == 2);  // the gradient inside the recompute needed none
  CHECK(calls.count() == 3);
  require_bit_equal(grad_of(y, {x}), plain);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

TEST_CASE("a second backward inside a region asks for retain_graph as plain execution does",
          "[rule-6]") {
  const Tensor x = leaf({3});
  auto twice = [](Map inner, std::optional<bool> retain) {
    return [inner, retain](const Tensor& t) {
      const Tensor y = inner(t);
      const Tensor first = grad_of(y, {t}, {.retain_graph = retain})[0];
      return t.sin() * (first + grad_of(y, {t}, {.retain_graph = retain})[0]);
    };
  };
  SECTION("when tensors were saved, without retain_graph") {
    try {
      remat::checkpoint(twice([](const Tensor& t) { return t.sin().exp(); }, std::nullopt), x);
      FAIL("nothing was thrown");
    } catch (const remat::CheckpointError& e) {
      FAIL("a CheckpointError: " << e.what());
    } catch (const c10::Error& e) {
      CHECK_THAT(text_of(e), contains("Specify retain_graph=True"));
    }
    CHECK(remat::counters().frames_alive == 0);
  }
  SECTION("with retain_graph it works") {
    const Map f = twice([](const Tensor& t) { return t.sin().exp(); }, true);
    require_bit_equal(grad_of(remat::checkpoint(f, x), {x}), grad_of(f(x), {x}));
  }
  SECTION("when nothing was saved it works") {
    const Map f = twice([](const Tensor& t) { return t + t; }, std::nullopt);
    require_bit_equal(grad_of(remat::checkpoint(f, x), {x}), grad_of(f(x), {x}));
  }
}

TEST_CASE("a gradient step inside a region is differentiated as plain execution does", "[rule-6]") {
  // Meta-learning: two unrolled steps on a weight, each a gradient with create_graph.
  const Tensor w = leaf({4, 4}, at::kDouble), x = leaf({3, 4}, at::kDouble);
  auto step = [](const Tensor& weight, const Tensor& data) {
    const Tensor loss = data.mm(weight).tanh().pow(2).sum();
    return weight - 0.1 * grad_of(loss, {weight}, {.create_graph = true})[0];
  };
  auto plain = [&](const Tensor& weight, const Tensor& data) {
    return step(step(weight, data), data);
  };
  const Tensors expected = grad_of(plain(w, x), {w, x});
  Calls calls;
  const Tensor each =
      remat::checkpoint(counted(calls, step), remat::checkpoint(counted(calls, step), w, x), x);
  const Tensors grads = grad_of(each, {w, x});
  const Tensors whole = grad_of(remat::checkpoint(plain, w, x), {w, x});
  const Tensors nested =
      grad_of(remat::checkpoint(
                  [&](const Tensor& weight, const Tensor& data) {
                    return remat::checkpoint(step, remat::checkpoint(step, weight, data), data);
                  },
                  w, x),
              {w, x});
  for (size_t i = 0; i < 2; ++i) {
    require_close(grads[i], expected[i]);
    require_close(whole[i], expected[i]);
    require_close(nested[i], expected[i]);
  }
}

TEST_CASE("a backward inside a region's first run accumulates once", "[rule-6][rule-14]") {
  // It needs the region's own slots, so the function runs again, but only up to the last of them.
  const Tensor x = leaf({3}), w = leaf({3});
  Calls calls;
  auto f = counted(calls, [&](const Tensor& t) {
    const Tensor h = (t * w).exp();
    h.sum().backward();
    return t * 2;
  });
  auto grads_of = [&](bool drop) {
    x.mutable_grad() = w.mutable_grad() = Tensor();
    const Tensor y = drop ? remat::checkpoint(f, x) : f(x);
    y.sum().backward();
    Tensors grads{x.grad(), w.grad()};
    x.mutable_grad() = w.mutable_grad() = Tensor();
    return grads;
  };
  const Tensors plain = grads_of(false);
  calls.reset();
  const Tensors grads = grads_of(true);
  CHECK(calls.count() == 2);
  require_bit_equal(grads, plain);
}

TEST_CASE("a backward inside a region ends at an input that has a history", "[rule-6][rule-2]") {
  const bool early_stop = GENERATE(true, false);
  const bool nested = GENERATE(true, false);
  CAPTURE(early_stop, nested);
  const remat::EarlyStopGuard guard(early_stop);
  const Tensor x = leaf({3});
  auto f = [](const Tensor& t) {
    const Tensor y = (t * 2).sin();
    y.sum().backward({}, /*retain_graph=*/true);
    return y.exp();
  };
  auto g = [&](const Tensor& t) {
    return nested ? remat::checkpoint(
                        [&](const Tensor& u) { return remat::checkpoint(f, u.cos()); }, t)
                  : remat::checkpoint(f, t);
  };
  auto plain_of = [&](const Tensor& t) { return (nested ? t.cos() * 2 : t * 2).sin().exp(); };
  const Tensors plain = grad_of(plain_of(x.tanh()), {x});
  const Tensor y = g(x.tanh());
  x.mutable_grad() = Tensor();  // the backward inside forward reached it, as in plain execution
  for (int i = 0; i < 2; ++i) {
    require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
    CHECK_FALSE(x.grad().defined());
  }
}

using Pair = std::function<Tensor(const Tensor&, const Tensor&)>;

/// Zeros where there is no way.
Tensor slope(const Tensor& y, const Tensor& of) {
  const Tensor found = torch::autograd::grad({y.sum()}, {of}, {}, /*retain_graph=*/true,
                                             /*create_graph=*/false, /*allow_unused=*/true)[0];
  return found.defined() ? found : at::zeros_like(of);
}

void check_unsupported(const remat::CheckpointOptions& options, const Pair& f, const Tensor& a,
                       const Tensor& b) {
  // In forward, if a later backward there needs a recompute.
  const auto error =
      error_of<remat::CheckpointError>([&] { grad_of(remat::checkpoint(options, f, a, b), {a}); });
  CHECK(error.kind() == remat::CheckpointError::Kind::Unsupported);
  CHECK_THAT(std::string(error.what()), contains("a gradient was taken inside a region"));
}

void check_agrees(const remat::CheckpointOptions& options, const Pair& f, const Tensor& a,
                  const Tensor& b) {
  for (int i = 0; i < 2; ++i)
    require_bit_equal(grad_of(remat::checkpoint(options, f, a, b), {a}, {.retain_graph = true}),
                      grad_of(f(a, b), {a}, {.retain_graph = true}));
}

TEST_CASE("a gradient that a recompute would take of less than forward did is an error",
          "[rule-6][rule-2]") {
  remat::CheckpointOptions options{.early_stop = GENERATE(true, false)};
  if (GENERATE(true, false)) options.policy = remat::save_ops({"aten::sin"});
  const bool is_leaf = GENERATE(true, false);
  const int64_t size = GENERATE(3, 8192);  // so that the recompute is stopped early, too
  CAPTURE(options.early_stop, is_leaf, size);
  const Tensor w = leaf({size});
  const Tensor x = is_leaf ? leaf({size}) : w * 2;
  const Tensor other = x.detach().clone().requires_grad_() * 3;
  const auto throws = [&](const Pair& f, const Tensor& b) { check_unsupported(options, f, x, b); };
  const auto agrees = [&](const Pair& f, const Tensor& b) { check_agrees(options, f, x, b); };
  const Pair by_first = [](const Tensor& a, const Tensor& b) { return slope(a * b, a) * a.sin(); };
  const Pair by_second = [](const Tensor& a, const Tensor& b) { return slope(a * b, b) * a.sin(); };

  // Through the history of an argument.
  if (!is_leaf)
    throws([&](const Tensor& a, const Tensor&) { return slope(a * w, w) * a.sin(); }, other);
  throws(by_first, x.view(size));
  throws(by_first, x.cos());
  agrees(by_first, other);
  agrees(by_second, other);
  agrees(by_first, x);
  agrees([](const Tensor& a, const Tensor& b) { return slope(a.cos(), a) * b; }, x.view(size));

  // An argument that is captured, too: a leaf is the same tensor in the recompute.
  const auto of_both = [&](const Pair& f, const Tensor& b) {
    is_leaf ? check_agrees(options, f, x, b) : check_unsupported(options, f, x, b);
  };
  of_both([&](const Tensor& a, const Tensor&) { return slope(a * x, a) * a.sin(); }, other);
  of_both([&](const Tensor& a, const Tensor&) { return slope(a * x, x) * a.sin(); }, other);
  of_both([&](const Tensor& a, const Tensor&) { return slope(w * x, a) * a.sin(); }, other);
  of_both([&](const Tensor& a, const Tensor&) { return slope(w * a, x) * a.sin(); }, other);
  const Tensor captured = x.cos();
  of_both([&](const Tensor& a, const Tensor&) { return slope(w * captured, a) * a.sin(); }, other);
  agrees([&](const Tensor& a, const Tensor&) { return slope(captured * x, x) * a.sin(); }, other);
  agrees([&](const Tensor& a, const Tensor&) { return slope(a.cos() * 2, a) * x.sin(); }, other);

  // It is an error also where the function catches it.
  of_both(
      [&](const Tensor& a, const Tensor&) {
        Tensor found = a.detach();
        try {
          found = slope(a * x, a);
        } catch (const std::exception&) {
        }
        return (found * a.sin()).exp() + 1;
      },
      other);

  // Hooks that an argument has; those that the function gives it are given again.
  if (!is_leaf)
    agrees(
        [](const Tensor& a, const Tensor&) {
          const Tensor c = a * 1;
          c.register_hook([](const Tensor& g) { return g * 3; });
          return slope(c * c, c) * a.sin();
        },
        other);
  x.register_hook([](const Tensor& g) { return g * 3; });
  throws([](const Tensor& a, const Tensor&) { return slope(a * a, a) * a.sin(); }, other);
  agrees(by_second, other);
  agrees(
      [](const Tensor& a, const Tensor&) {
        const Tensor c = a.sin();
        return slope(c * c, c) * a;
      },
      other);
}

TEST_CASE("of several backwards inside a region those that a recompute can repeat are",
          "[rule-6][rule-2]") {
  const remat::CheckpointOptions options{.early_stop = GENERATE(true, false)};
  const Tensor w = leaf({3}), x = w * 2, other = leaf({3});
  const auto bad = [&](const Tensor& a) { return slope(a * w, w); };
  const auto good = [](const Tensor& a) { return slope(a.exp(), a); };
  for (const bool is_bad_first : {true, false}) {
    // The result of the bad one is in no gradient, but the recompute cannot know that.
    const auto both = [&](const Tensor& a, const Tensor&) {
      const Tensor first = is_bad_first ? bad(a) : good(a);
      const Tensor second = is_bad_first ? good(a) : bad(a);
      return ((is_bad_first ? second : first) * a).sin().exp();
    };
    check_unsupported(options, both, x, other);
  }
  // A backward in a region inside, and one in save_region, which no recompute runs.
  check_agrees(
      options,
      [&](const Tensor& a, const Tensor&) {
        return remat::checkpoint([&](const Tensor& a) { return (good(a) * a).sin(); }, a.cos()) *
               (good(a) * a).sin();
      },
      x, other);
  check_unsupported(
      options,
      [&](const Tensor& a, const Tensor&) {
        return remat::checkpoint([&](const Tensor& a) { return (bad(a) * a).sin(); }, a.cos());
      },
      x, other);
  check_agrees(
      options,
      [&](const Tensor& a, const Tensor&) {
        const Tensor kept = remat::save_region([&](const Tensor& a) { return bad(a); }, a);
        return (kept * good(a) * a).sin();
      },
      x, other);
  check_unsupported(
      options,
      [&](const Tensor& a, const Tensor&) {
        const Tensor kept = remat::save_region([&](const Tensor& a) { return good(a); }, a);
        return (kept * bad(a) * a).sin();
      },
      x, other);
}

TEST_CASE("a noexcept function meets a backward that its recompute cannot repeat",
          "[rule-6][rule-12]") {
  const Tensor w = leaf({3}), x = w * 2;
  x.register_hook([](const Tensor& g) { return g * 3; });
  const auto f = [](const Tensor& a) noexcept { return (slope(a * a, a) * a).sin(); };
  const Tensor y = remat::checkpoint(f, x);
  const auto error = error_of<remat::CheckpointError>([&] { grad_of(y, {w}); });
  CHECK(error.kind() == remat::CheckpointError::Kind::Unsupported);
}

TEST_CASE("an argument that dies in the function is not taken for what is made there", "[rule-6]") {
  const Tensor w = leaf({3});
  // The node of the argument, and the leaf, make room for new ones.
  const auto by_value = [&w](Tensor a) {
    a = a.detach().requires_grad_();
    const Tensor g = torch::autograd::grad({a.sin().sum()}, {a})[0];
    return (g * w).sin();
  };
  const auto by_reference = [&w](const Tensor& a) {
    return (torch::autograd::grad({a.sin().sum()}, {a})[0] * w).sin();
  };
  for (int i = 0; i < 50; ++i) {
    const Tensor start = at::randn({3});
    const Tensors expected = grad_of(by_reference(start.clone().requires_grad_()), {w});
    require_bit_equal(grad_of(remat::checkpoint(by_value, start.clone().requires_grad_() * 1), {w}),
                      expected);
    require_bit_equal(grad_of(remat::checkpoint(by_value, start.clone().requires_grad_()), {w}),
                      expected);
    require_bit_equal(
        grad_of(remat::checkpoint(by_reference, start.clone().requires_grad_() * 1), {w}),
        expected);
    require_bit_equal(grad_of(remat::checkpoint(by_reference, start.clone().requires_grad_()), {w}),
                      expected);
  }
}

TEST_CASE("a recompute that ends before a backward that it could not repeat is no error",
          "[rule-6][rule-5]") {
  const Tensor w = leaf({3}), x = w * 2;
  const auto f = [&w](const Tensor& a) {
    const Tensor y = a.sin() * a;
    torch::autograd::grad({(a * w).sum()}, {w}, {}, /*retain_graph=*/true);
    return y;
  };
  require_bit_equal(grad_of(remat::checkpoint(f, x), {w}, {.retain_graph = true}),
                    grad_of(f(x), {w}));
}

TEST_CASE("a backward inside a region over a graph that a nested region built", "[rule-6]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const remat::EarlyStopGuard guard(early_stop);
  const Tensor x = leaf({3}, at::kDouble);
  auto f = [](const Tensor& t, bool nest) {
    auto inner = [](const Tensor& u) { return u.sin().exp(); };
    const Tensor h = nest ? remat::checkpoint(inner, t) : inner(t);
    const Tensor g = grad_of(h, {t}, {.retain_graph = true})[0];
    return h * g.detach() + grad_of(h, {t}, {.create_graph = true})[0].cos();
  };
  const Tensors plain = grad_of(f(x, false), {x});
  const Tensor y = remat::checkpoint([&](const Tensor& t) { return f(t, true); }, x);
  require_close(y, f(x, false));
  for (int i = 0; i < 2; ++i) require_close(grad_of(y, {x}, {.retain_graph = true})[0], plain[0]);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

}  // namespace
