// Rule 6: several backward calls over one region, in part, repeated, and inside each other.

#include "tests/support/support.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// ---- several backward calls over one region

TEST_CASE("the outputs of a region can be differentiated one after the other", "[rule-6]") {
  const Tensor x = leaf({3});
  Calls calls;
  auto f = [](const Tensor& t) {
    const Tensor h = t.sin();
    return std::tuple(h.exp(), h.cos(), h * t);
  };
  Tensors plain;
  {
    const auto [a, b, d] = f(x);
    plain = {grad_of(a, {x}, {.retain_graph = true})[0], grad_of(b, {x}, {.retain_graph = true})[0],
             grad_of(d, {x})[0]};
  }
  Counted done;
  const auto [a, b, d] = remat::checkpoint(counted(calls, f), x);
  require_bit_equal(grad_of(a, {x}, {.retain_graph = true}), {plain[0]});
  require_bit_equal(grad_of(b, {x}, {.retain_graph = true}), {plain[1]});
  require_bit_equal(grad_of(d, {x}), {plain[2]});
  CHECK(calls.count() == 4);
  CHECK(done.now().recomputes == 3);
  CHECK_THROWS_WITH(grad_of(a, {x}),
                    contains("Trying to backward through the graph a second time"));
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

TEST_CASE("gradients for some inputs only are right, whatever is asked and in any order",
          "[rule-6]") {
  Tensors leaves;
  for (int i = 0; i < 4; ++i) leaves.push_back(leaf({3, 3}));
  auto f = [](const Tensors& t) {
    return t[0].mm(t[1]).sin().mm(t[2].exp()) * at::softmax(t[3], 0) * t[0];
  };
  const Tensors plain = grad_of(f(leaves), leaves);
  Calls calls;
  const Tensor y = remat::checkpoint(counted(calls, f), leaves);
  int64_t backwards = 0;
  for (unsigned mask = 1; mask < 16; ++mask) {
    Tensors asked, expected;
    for (unsigned i = 0; i < 4; ++i) {
      if (mask >> i & 1) {
        asked.insert(asked.begin(), leaves[i]);
        expected.insert(expected.begin(), plain[i]);
      }
    }
    require_bit_equal(grad_of(y, asked, {.retain_graph = true}), expected);
    CHECK(calls.count() == 1 + ++backwards);
    CHECK(remat::counters().recomputed_bytes_alive == 0);
  }
}

// ---- backward inside backward

// A node holds its own lock while it reads what it saved, so within one backward no node may be
// reached again: hooks run before that lock is taken, and other outputs have other nodes.

TEST_CASE("a backward inside a backward over the same region recomputes for itself",
          "[rule-6][rule-7]") {
  const Tensor x = leaf({3});
  Calls calls;
  std::function<void()> in_backward;
  auto f = counted(calls, [&](const Tensor& t) {
    const Tensor h = t.sin().exp();
    h.register_hook([&](const Tensor&) { in_backward(); });
    return h.cos().sin();
  });
  const Tensors plain = grad_of(x.sin().exp().cos().sin(), {x});
  Counted done;
  const Tensor y = remat::checkpoint(f, x);
  int depth = 0;
  Tensors inner;
  in_backward = [&] {
    if (depth == 2) return;
    ++depth;  // the task below has read two of its four slots when the next one starts
    inner.push_back(grad_of(y, {x}, {.retain_graph = true})[0]);
  };
  require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
  require_bit_equal(inner, {plain[0], plain[0]});
  CHECK(done.now().recomputes == 3);
  CHECK(calls.count() == 4);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

TEST_CASE("a recompute that runs a backward over its own region gets another recompute",
          "[rule-6][rule-7]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor x = leaf({3});
  std::pair<Tensor, Tensor> y;
  Calls calls;
  bool entered = false;
  Tensors inner;
  const Tensors plain_first = grad_of(x.sin().exp(), {x}), plain_second = grad_of(x.cos(), {x});
  y = remat::checkpoint(
      {.early_stop = early_stop},
      [&](const Tensor& t) {
        calls();
        const Tensor h = t.sin();
        if (remat::is_recomputing() && !entered) {
          entered = true;
          inner = grad_of(y.second, {x}, {.retain_graph = true});
        }
        const Tensor first = h.exp();
        return std::pair(first, t.cos());
      },
      x);
  require_bit_equal(grad_of(y.first, {x}, {.retain_graph = true}), plain_first);
  require_bit_equal(inner, plain_second);
  CHECK(calls.count() == 3);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
  y = {};
}

/// The identity; its backward runs a backward over another of its kind, `depth` deep, and at the
/// bottom a function with grad mode on.
struct Nest : torch::autograd::Function<Nest> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, int64_t depth,
                        const std::function<void()>* bottom) {
    ctx->saved_data["depth"] = depth;
    ctx->saved_data["bottom"] = reinterpret_cast<int64_t>(bottom);
    return x.view_as(x);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const int64_t depth = ctx->saved_data["depth"].toInt();
    const auto* bottom =
        reinterpret_cast<const std::function<void()>*>(ctx->saved_data["bottom"].toInt());
    const at::AutoGradMode grad_mode(true);
    if (depth == 0) {
      (*bottom)();
    } else {
      const Tensor next = at::ones({1}).requires_grad_();
      grad_of(Nest::apply(next, depth - 1, bottom), {next});
    }
    return {grads[0], Tensor(), Tensor()};
  }
};

TEST_CASE("a stop that falls into backward calls nested in the region lets them finish",
          "[rule-6][rule-5]") {
  const int64_t depth = GENERATE(as<int64_t>{}, 0, 10, 80, 131);
  const bool early_stop = GENERATE(true, false);
  CAPTURE(depth, early_stop);
  const Tensor x = leaf({100000});
  Calls calls;
  auto f = counted(calls, [depth](const Tensor& t) {
    const Tensor h = t.exp();
    Tensor deep;
    const std::function<void()> bottom = [&] { deep = h.sin(); };  // the last save of the region
    const Tensor start = at::ones({1}).requires_grad_();
    grad_of(Nest::apply(start, depth, &bottom), {start});
    return deep;
  });
  const Tensors plain = grad_of(x.exp().sin(), {x});
  Counted done;
  const Tensor y = remat::checkpoint({.early_stop = early_stop}, f, x);
  CHECK(done.now().tensors_dropped == 2);
  for (int i = 1; i <= 2; ++i) {
    require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
    CHECK(calls.count() == 1 + i);
  }
}

TEST_CASE("a region is recomputed on whatever thread a deeply nested backward runs", "[rule-6]") {
  const int64_t depth = GENERATE(as<int64_t>{}, 0, 80, 131);
  CAPTURE(depth);
  const Tensor x = leaf({3});
  Calls calls;
  const Tensor y = remat::checkpoint(
      counted(calls, [](const Tensor& t) { return at::dropout(t.sin().exp(), 0.5, true) * t; }), x);
  const Tensors at_top = grad_of(y, {x}, {.retain_graph = true});
  const Tensor before = generator_state();
  Tensors deep;
  const std::function<void()> bottom = [&] {
    deep = grad_of(y, {x}, {.retain_graph = true});
    if (remat::current_phase().phase != remat::Phase::None) deep.clear();
  };
  const Tensor start = at::ones({1}).requires_grad_();
  grad_of(Nest::apply(start, depth, &bottom), {start});
  require_bit_equal(deep, at_top);
  CHECK(calls.count() == 3);
  CHECK(at::equal(generator_state(), before));
}

}  // namespace
