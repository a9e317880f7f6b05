// Rule 5: a recompute never stops where an operator has yet to write what it saved, or would leak.

#include "tests/support/saving_functions.h"
#include "tests/support/sizes.h"
#include "tests/support/support.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

TEST_CASE("training rrelu at the end of a region gives plain gradients", "[rule-5]") {
  const bool early_stop = GENERATE(true, false);
  const bool in_place = GENERATE(true, false);
  CAPTURE(early_stop, in_place);
  Calls calls;
  auto f = counted(calls, [in_place](const Tensor& t) {
    Tensor h = t * 2;
    return in_place ? at::rrelu_(h, 0.1, 0.9, /*training=*/true)
                    : at::rrelu(h, 0.1, 0.9, /*training=*/true);
  });
  for (int repeat = 0; repeat < 20; ++repeat) {
    const Tensor x = leaf({1 + repeat * 97});
    require_same_grads(
        f, [&](const Tensor& t) { return remat::checkpoint({.early_stop = early_stop}, f, t); }, x);
  }
  CHECK(calls.count() == 60);
}

TEST_CASE("rrelu followed by other operators, and rrelu twice, give plain gradients", "[rule-5]") {
  auto f = [](const Tensor& t) {
    return at::rrelu(at::rrelu(t.sin(), 0.1, 0.9, true) * t, 0.2, 0.4, true).clone();
  };
  for (int repeat = 0; repeat < 20; ++repeat) {
    const Tensor x = leaf({5000 + repeat});
    require_same_grads(f, [&](const Tensor& t) { return remat::checkpoint(f, t); }, x);
  }
}

TEST_CASE("operators that save what their kernel has yet to write give plain gradients",
          "[rule-5]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const remat::EarlyStopGuard guard(early_stop);
  auto check = [](auto f, at::IntArrayRef sizes) {
    const Tensor x = leaf(sizes);
    Calls calls;
    require_same_grads(
        f, [&](const Tensor& t) { return remat::checkpoint(counted(calls, f), t); }, x);
    CHECK(calls.count() == 2);
  };
  check([](const Tensor& t) { return at::dropout(t * 2, 0.5, true); }, {100, 100});
  check([](const Tensor& t) { return std::get<0>(at::native_dropout(t * 2, 0.5, true)); },
        {100, 100});
  check([](const Tensor& t) { return at::feature_dropout(t * 2, 0.5, true); }, {8, 16, 3, 3});
  check([](const Tensor& t) { return at::alpha_dropout(t * 2, 0.5, true); }, {100, 100});
  check([](const Tensor& t) { return at::layer_norm(t * 2, {32}); }, {64, 32});
  check([](const Tensor& t) { return at::group_norm(t * 2, 4); }, {8, 16, 3, 3});
  check(
      [](const Tensor& t) {
        return at::batch_norm(t * 2, {}, {}, {}, {}, /*training=*/true, 0.1, 1e-5, false);
      },
      {8, 16, 3, 3});
  check([](const Tensor& t) { return std::get<0>(at::max(t * 2, 1)); }, {40, 50});
  check([](const Tensor& t) { return std::get<0>(at::sort(t * 2, 1)); }, {40, 50});
  check([](const Tensor& t) { return at::max_pool2d(t * 2, {2, 2}); }, {2, 3, 16, 16});
  check([](const Tensor& t) { return std::get<0>(at::adaptive_max_pool2d(t * 2, {3, 3})); },
        {2, 3, 16, 16});
  check(
      [](const Tensor& t) {
        return at::nll_loss(at::log_softmax(t * 2, 1), at::arange(40).remainder(5));
      },
      {40, 5});
  check([](const Tensor& t) { return at::scaled_dot_product_attention(t, t * 2, t * 3); },
        {2, 2, 16, 8});
  check([](const Tensor& t) { return at::_foreach_exp({t * 2, t * 3})[1]; }, {1000});
  check([](const Tensor& t) { return at::where(t > 0, t * 2, t.sin()); }, {1000});
  check([](const Tensor& t) { return (t * 2).index_select(0, at::arange(3)); }, {10, 10});
  check([](const Tensor& t) { return at::gather(t * 2, 1, std::get<1>(at::sort(t, 1))); },
        {20, 30});
  check([](const Tensor& t) { return (t * 2).cumsum(0).logcumsumexp(0); }, {100});
  check([](const Tensor& t) { return at::linalg_inv(t + at::eye(6) * 9); }, {6, 6});
  check([](const Tensor& t) { return std::get<1>(at::linalg_svd(t + at::eye(6))); }, {6, 6});
}

TEST_CASE("in-place operators at the end of a region give plain gradients", "[rule-5]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const remat::EarlyStopGuard guard(early_stop);
  auto check = [](auto f) {
    const Tensor x = leaf({10000});
    Calls calls;
    require_same_grads(
        f, [&](const Tensor& t) { return remat::checkpoint(counted(calls, f), t); }, x);
    CHECK(calls.count() == 2);
  };
  check([](const Tensor& t) { return t.clone().exp_(); });
  check([](const Tensor& t) { return t.clone().sin_(); });
  check([](const Tensor& t) { return t.clone().sin_().cos_().relu_(); });
  check([](const Tensor& t) { return at::dropout_(t.clone().sin_(), 0.3, true); });
  check([](const Tensor& t) {
    Tensor h = t.clone();
    h.narrow(0, 0, 5000).sin_();
    h.narrow(0, 2500, 5000).cos_();
    return h;
  });
  check([](const Tensor& t) {
    Tensor h = at::zeros({10000});
    h.narrow(0, 0, 10000).copy_(t.sin());
    return h.mul_(2).tanh_();
  });
}

/// Saves its input, its output and a tensor of its own.
struct SavesAll : torch::autograd::Function<SavesAll> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    const Tensor own = x.sin();
    const Tensor y = x.exp();
    ctx->save_for_backward({x, y, own, Tensor(), y});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    return {grads[0] * saved[4] + (saved[0] * 0 + saved[1] * 0 + saved[2] * 0)};
  }
};

/// Changes its input in place, and saves it: it is the output too.
struct SavesDirty : torch::autograd::Function<SavesDirty> {
  static Tensor apply(const Tensor& x) {
    return torch::autograd::Function<SavesDirty>::apply(x * 1);
  }
  static Tensor forward(AutogradContext* ctx, Tensor x) {
    x.exp_();
    ctx->mark_dirty({x});
    ctx->save_for_backward({x});
    return x;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return {grads[0] * ctx->get_saved_variables()[0]};
  }
};

/// Builds nodes of its own in its forward, before it saves its output.
struct SavesAfterGradient : torch::autograd::Function<SavesAfterGradient> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    Tensor y;
    {
      const at::AutoGradMode grad(true);
      y = x.detach().requires_grad_().exp().detach();
    }
    ctx->save_for_backward({y});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return {grads[0] * ctx->get_saved_variables()[0]};
  }
};

TEMPLATE_TEST_CASE("a C++ Function that saves its own output does not leak when stopped",
                   "[rule-5]", SavesExp, SavesAll, SavesDirty, SavesAfterGradient) {
  const bool early_stop = GENERATE(true, false);
  const int where = GENERATE(0, 1, 2);
  CAPTURE(early_stop, where);
  const Tensor x = (at::randn({large}) * 0.1).requires_grad_();
  const Tensors plain = grad_of(where == 1 ? x.exp().exp() : x.exp(), {x});
  Calls calls;
  LiveBytes bytes;
  for (int i = 0; i < 3; ++i) {
    const Tensor y = remat::checkpoint(
        {.early_stop = early_stop},
        counted(calls,
                [&](const Tensor& t) {
                  if (where == 0) return TestType::apply(t);
                  if (where == 1) return TestType::apply(TestType::apply(t));
                  return remat::checkpoint([](const Tensor& u) { return TestType::apply(u); }, t)
                      .clone();
                }),
        x);
    const WeakGraph graph(Tensors{y});
    require_bit_equal(grad_of(y, {x}), plain);
  }
  CHECK(bytes.held() == 0);
  CHECK(remat::counters().frames_alive == 0);
  CHECK(calls.count() == 6);
}

TEST_CASE("a C++ Function after a stop that was caught does not leak", "[rule-5]") {
  const bool in_forward = GENERATE(true, false);
  CAPTURE(in_forward);
  const Tensor x = leaf({4});
  Tensors grads;
  {
    const Tensor y = remat::checkpoint(
        [&](const Tensor& t) {
          Tensor h = t * 2;
          try {
            h = t.sin() * t;
            // Waits for a recompute that can know nothing of what follows.
            if (in_forward) grad_of(h, {t}, {.retain_graph = true});
          } catch (...) {
          }
          SavesAll::apply(t);
          return h;
        },
        x);
    grads = grad_of(y, {x});
  }
  require_bit_equal(grads, grad_of(x.sin() * x, {x}));
}

TEST_CASE("a C++ Function that only a recompute meets, after a caught stop, does not leak",
          "[rule-5]") {  // fuzz_1795424679002496
  const Tensor x = leaf({large});
  int calls = 0, functions = 0;
  Tensors grads;
  {
    const Tensor y = remat::checkpoint(
        [&](const Tensor& t) {
          Tensor h;
          try {
            h = t.sin().cos();
          } catch (...) {
          }
          if (++calls > 1) SavesAll::apply(t), ++functions;
          return h;
        },
        x);
    grads = grad_of(y, {x});
  }
  require_bit_equal(grads, grad_of(x.sin().cos(), {x}));
  CHECK(functions == 1);
}

TEST_CASE("a read in forward order meets the same values wherever the stop falls", "[rule-5]") {
  // Regions of 1 to 6 operators of every kind of save: input, result, both, none, buffer.
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const std::vector<std::function<Tensor(const Tensor&)>> kinds{
      [](const Tensor& t) { return t.sin(); },
      [](const Tensor& t) { return t.exp().tanh(); },
      [](const Tensor& t) { return t * t; },
      [](const Tensor& t) { return t + 1; },
      [](const Tensor& t) { return at::dropout(t, 0.25, true); },
      [](const Tensor& t) { return at::rrelu(t, 0.1, 0.9, true); },
      [](const Tensor& t) { return SavesAll::apply(t * 0.1); },
      [](const Tensor& t) { return t.clone().sigmoid_(); },
  };
  const Tensor x = leaf({5000});
  for (size_t first = 0; first < kinds.size(); ++first) {
    for (size_t second = 0; second < kinds.size(); ++second) {
      for (size_t third = 0; third < kinds.size(); ++third) {
        CAPTURE(first, second, third);
        auto f = [&](const Tensor& t) { return kinds[third](kinds[second](kinds[first](t))); };
        require_same_grads(
            f, [&](const Tensor& t) { return remat::checkpoint({.early_stop = early_stop}, f, t); },
            x);
      }
    }
  }
}

TEST_CASE("numerical gradient checks pass with early stop on and off", "[rule-5]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor x = leaf({3, 4}, at::kDouble), w = leaf({4, 4}, at::kDouble);
  Calls calls;
  auto body = counted(calls, [](const Tensor& t, const Tensor& u) {
    return at::layer_norm(at::softmax(t.mm(u).tanh(), 1).mm(u), {4}).sin();
  });
  auto region = [&](const Tensor& t, const Tensor& u) {
    return remat::checkpoint({.early_stop = early_stop}, body, t, u);
  };
  // f(point + h d) - f(point - h d) against the analytic derivative, along random directions.
  const Tensor weights = at::randn({3, 4}, at::kDouble);
  auto value = [&](const Tensor& t, const Tensor& u) { return (body(t, u) * weights).sum(); };
  const Tensors first = torch::autograd::grad({(region(x, w) * weights).sum()}, {x, w});
  CHECK(calls.count() == 2);
  const double h = 1e-5;
  for (int direction = 0; direction < 5; ++direction) {
    at::NoGradGuard no_grad;
    const Tensor dx = at::randn_like(x), dw = at::randn_like(w);
    const double numeric =
        ((value(x + dx * h, w + dw * h) - value(x - dx * h, w - dw * h)) / (2 * h)).item<double>();
    const double analytic = ((first[0] * dx).sum() + (first[1] * dw).sum()).item<double>();
    CHECK(std::abs(numeric - analytic) < 1e-6 * (1 + std::abs(analytic)));
  }
  // Second order: the derivative of <grad, v>.
  const Tensor v = at::randn_like(x).detach();
  auto directional = [&](const Tensor& t, const Tensor& u) {
    return (torch::autograd::grad({(region(t, u) * weights).sum()}, {t}, {}, std::nullopt,
                                  /*create_graph=*/true)[0] *
            v)
        .sum();
  };
  const Tensors second = torch::autograd::grad({directional(x, w)}, {x, w});
  for (int direction = 0; direction < 5; ++direction) {
    Tensor dx, dw, plus_x, plus_w, minus_x, minus_w;
    {
      at::NoGradGuard no_grad;
      dx = at::randn_like(x), dw = at::randn_like(w);
      plus_x = x + dx * h, plus_w = w + dw * h, minus_x = x - dx * h, minus_w = w - dw * h;
    }
    for (Tensor* t : {&plus_x, &plus_w, &minus_x, &minus_w}) t->requires_grad_();
    const double numeric =
        ((directional(plus_x, plus_w) - directional(minus_x, minus_w)) / (2 * h)).item<double>();
    const double analytic = ((second[0] * dx).sum() + (second[1] * dw).sum()).item<double>();
    CHECK(std::abs(numeric - analytic) < 1e-5 * (1 + std::abs(analytic)));
  }
}

}  // namespace
