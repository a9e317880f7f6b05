// Many threads and deep backward passes at once: Rules 7, 11, 12 and 13 under load.

#include <thread>

#include "tests/support/support.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int deepest = 60, rounds = 3;
#else
constexpr int deepest = 200, rounds = 20;
#endif

/// A model with nested regions, dropout, an in-place operator and a captured parameter.
Tensor model(const Tensor& x, const Tensor& w, bool drop) {
  const auto block = [w](const Tensor& t) {
    const Tensor h = at::dropout((t.matmul(w)).sin(), 0.3, /*train=*/true);
    return (h * h.sigmoid()).relu_() + t;
  };
  if (!drop) return block(block(block(block(x))));
  const auto pair = [block](const Tensor& t) {
    return remat::checkpoint(block, remat::checkpoint(block, t));
  };
  return remat::checkpoint(pair, pair(x));
}

void in_threads(int count, const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&, i] { work(i); });
  for (std::thread& each : threads) each.join();
}

TEST_CASE("eight threads train eight models with dropout", "[threads][rule-7][rule-11]") {
  std::atomic<int> right{0};
  in_threads(8, [&](int) {
    for (int round = 0; round < rounds; ++round) {
      const Tensor w = leaf({6, 6}), x = at::ones({4, 6}).requires_grad_();
      // The order in which threads draw differs from run to run, so there is no plain run to
      // compare with; two recomputes must agree, and the next case looks at the numbers.
      const Tensor y = model(x, w, /*drop=*/true);
      const Tensors once = grad_of(y, {x, w}, {.retain_graph = true});
      const Tensors again = grad_of(y, {x, w}, {.retain_graph = true});
      if (at::equal(once[0], again[0]) && at::equal(once[1], again[1])) ++right;
    }
  });
  CHECK(right == 8 * rounds);
  CHECK(remat::counters().frames_alive == 0);
}

TEST_CASE("eight threads get the gradients that their masks ask for", "[threads][rule-11]") {
  // With ones in, the output of nested dropouts is its own derivative.
  std::atomic<int> right{0};
  in_threads(8, [&](int) {
    const auto drop = [](const Tensor& t) { return at::dropout(t, 0.2, /*train=*/true); };
    for (int round = 0; round < rounds; ++round) {
      const Tensor x = at::ones({97}).requires_grad_();
      const Tensor y = remat::checkpoint(
          [&](const Tensor& t) {
            return remat::checkpoint(drop, drop(remat::checkpoint(drop, t)));
          },
          x);
      if (at::equal(grad_of(y, {x})[0], y)) ++right;
    }
  });
  CHECK(right == 8 * rounds);
}

TEST_CASE("four threads run backward over one shared graph", "[threads][rule-7]") {
  const Tensor w = leaf({6, 6}), x = leaf({4, 6});
  const auto block = [&](const Tensor& t) { return t.matmul(w).sin().exp().tanh(); };
  const auto nested = [&](const Tensor& t) { return remat::checkpoint(block, block(t)); };
  const Tensor y = remat::checkpoint(nested, remat::checkpoint(block, x));
  const Tensors plain = grad_of(block(block(block(x))), {x, w});
  std::atomic<int> right{0};
  in_threads(4, [&](int) {
    for (int round = 0; round < rounds; ++round) {
      const Tensors grads = grad_of(y, {x, w}, {.retain_graph = true});
      if (at::equal(grads[0], plain[0]) && at::equal(grads[1], plain[1])) ++right;
    }
  });
  CHECK(right == 4 * rounds);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

TEST_CASE("four threads with a cache each over one shared graph", "[threads][cache]") {
  const Tensor x = leaf({64});
  const auto f = [](const Tensor& t) { return t.sin().exp().tanh(); };
  const Tensor y = remat::checkpoint(f, remat::checkpoint(f, x));
  const Tensor plain = grad_of(f(f(x)), {x})[0];
  std::atomic<int> right{0};
  in_threads(4, [&](int i) {
    const remat::RecomputeCacheGuard cache({.max_bytes = 400 * i});
    for (int round = 0; round < rounds; ++round)
      if (at::equal(grad_of(y, {x}, {.retain_graph = true})[0], plain)) ++right;
  });
  CHECK(right == 4 * rounds);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

/// Its backward runs a whole backward, through regions, of one level less.
struct BackwardInBackward : torch::autograd::Function<BackwardInBackward> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, int64_t depth) {
    ctx->saved_data["depth"] = depth;
    ctx->save_for_backward({x});
    return x.sin();
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const int64_t depth = ctx->saved_data["depth"].toInt();
    const Tensor saved = ctx->get_saved_variables()[0];
    if (depth == 0) return {grads[0] * saved.cos(), Tensor()};
    const at::AutoGradMode with_grad(true);
    const Tensor x = saved.detach().requires_grad_();
    const Tensor y = remat::checkpoint(
        [depth](const Tensor& t) { return BackwardInBackward::apply(t.cos(), depth - 1).exp(); },
        x);
    const Tensor inner = grad_of(y, {x})[0];
    return {grads[0] * saved.cos() + inner * 0, Tensor()};
  }
};

TEST_CASE("backward inside backward, two hundred deep", "[threads][rule-7][rule-13]") {
  const bool in_several_threads = GENERATE(false, true);
  CAPTURE(in_several_threads);
  std::atomic<int> right{0};
  const int count = in_several_threads ? 3 : 1;
  in_threads(count, [&](int) {
    const Tensor x = leaf({3});
    const Tensor y =
        remat::checkpoint([](const Tensor& t) { return BackwardInBackward::apply(t, deepest); }, x);
    if (at::equal(grad_of(y, {x})[0], x.cos().detach())) ++right;
  });
  CHECK(right == count);
  CHECK(remat::counters().frames_alive == 0);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

}  // namespace
