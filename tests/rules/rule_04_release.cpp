// Rule 4: a recomputed tensor is dropped when it is unpacked; what a backward did not use, at its
// end.

#include "tests/support/sizes.h"
#include "tests/support/support.h"

namespace {

/// Runs a function in the backward between what was built after it and before it.
struct InBackward : torch::autograd::Function<InBackward> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x,
                        std::function<void()>* run) {
    ctx->saved_data["run"] = reinterpret_cast<int64_t>(run);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    (*reinterpret_cast<std::function<void()>*>(ctx->saved_data["run"].toInt()))();
    return {grads[0], Tensor()};
  }
};

TEST_CASE("each recomputed tensor is released when its node has read it", "[rule-4]") {
  // t * w1 * w2 ...: each step of backward releases one recomputed tensor and adds one parameter
  // grad, so what is released at once keeps the peak flat; what waits for the end doubles it.
  constexpr int steps = 12;
  const bool retain_graph = GENERATE(true, false);
  const bool early_stop = GENERATE(true, false);
  CAPTURE(retain_graph, early_stop);
  const remat::EarlyStopGuard guard(early_stop);
  Tensors weights;
  for (int i = 0; i < steps; ++i) weights.push_back(leaf({tensor_side, tensor_side}));
  const Tensor x = leaf({tensor_side, tensor_side});
  Calls calls;
  auto f = counted(calls, [&](Tensor t) {
    for (const Tensor& w : weights) t = t * w;
    return t;
  });
  const Tensor outer = at::ones({tensor_side, tensor_side});
  f(x).backward(outer);
  Tensors plain{x.grad()};
  for (const Tensor& w : weights) plain.push_back(w.grad());
  x.mutable_grad() = Tensor();
  for (const Tensor& w : weights) w.mutable_grad() = Tensor();
  calls.reset();

  const Tensor y = remat::checkpoint(f, x);
  LiveBytes bytes;
  y.backward(outer, retain_graph);
  CHECK(bytes.peak() <= (steps + 5) * tensor_bytes);
  CHECK(bytes.held() == (steps + 1) * tensor_bytes);  // the grads and nothing else
  CHECK(remat::counters().recomputed_bytes_alive == 0);
  CHECK(calls.count() == 2);
  Tensors grads{x.grad()};
  for (const Tensor& w : weights) grads.push_back(w.grad());
  require_bit_equal(grads, plain);
}

TEST_CASE("recomputed bytes fall while a backward proceeds", "[rule-4]") {
  std::vector<int64_t> alive;
  std::function<void()> note = [&] { alive.push_back(remat::counters().recomputed_bytes_alive); };
  const Tensor x = leaf({tensor_side, tensor_side});
  Calls calls;
  auto f = counted(calls, [&](Tensor t) {
    for (int i = 0; i < 4; ++i) t = InBackward::apply(t.sin(), &note);
    return t.sin();
  });
  const Tensor y = remat::checkpoint(f, x);
  grad_of(y, {x});
  REQUIRE(alive.size() == 4);
  for (size_t i = 0; i < alive.size(); ++i) {
    CHECK(alive[i] == static_cast<int64_t>(4 - i) * tensor_bytes);
  }
  CHECK(calls.count() == 2);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

TEST_CASE("after a backward that retains the graph nothing is kept, and the next one recomputes",
          "[rule-4]") {
  const Tensor x = leaf({tensor_side, tensor_side});
  Calls calls;
  const Tensor y =
      remat::checkpoint(counted(calls, [](const Tensor& t) { return t.sin().exp().cos(); }), x);
  const Tensors plain = grad_of(x.sin().exp().cos(), {x});
  Counted done;
  LiveBytes bytes;
  for (int i = 1; i <= 3; ++i) {
    require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
    CHECK(calls.count() == 1 + i);
    CHECK(done.now().recomputes == i);
    CHECK(done.now().tensors_recomputed == 3 * i);
    CHECK(bytes.held() == 0);
    CHECK(remat::counters().recomputed_bytes_alive == 0);
  }
}

TEST_CASE("what a partial backward did not need is dropped at its end", "[rule-4]") {
  const Tensor a = leaf({tensor_side, tensor_side}), b = leaf({tensor_side, tensor_side});
  auto f = [](const Tensor& s, const Tensor& t) { return s.sin().exp() * t.cos().exp(); };
  const Tensors plain = grad_of(f(a, b), {a, b});
  Calls calls;
  Counted done;
  const Tensor y = remat::checkpoint(counted(calls, f), a, b);
  LiveBytes bytes;
  SECTION("by autograd::grad") {
    require_bit_equal(grad_of(y, {a}, {.retain_graph = true}), {plain[0]});
    CHECK(bytes.held() == 0);
    CHECK(remat::counters().recomputed_bytes_alive == 0);
    require_bit_equal(grad_of(y, {b}), {plain[1]});
  }
  SECTION("by backward with inputs") {
    torch::autograd::backward({y}, {at::ones_like(y)}, /*retain_graph=*/true, false, {a});
    require_bit_equal({a.grad()}, {plain[0]});
    CHECK_FALSE(b.grad().defined());
    CHECK(bytes.held() == tensor_bytes);
    CHECK(remat::counters().recomputed_bytes_alive == 0);
    torch::autograd::backward({y}, {at::ones_like(y)}, std::nullopt, false, {b});
    require_bit_equal({b.grad()}, {plain[1]});
  }
  CHECK(calls.count() == 3);
  CHECK(done.now().recomputes == 2);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

TEST_CASE("what was recomputed for a part of the graph that dies meanwhile is freed at once",
          "[rule-4]") {
  const Tensor x = leaf({tensor_side, tensor_side});
  Tensor a, b;
  std::vector<int64_t> alive;
  std::function<void()> let_go = [&] {
    alive.push_back(remat::counters().recomputed_bytes_alive);
    b.reset();
    alive.push_back(remat::counters().recomputed_bytes_alive);
  };
  Calls calls;
  const auto f = counted(calls, [&](const Tensor& t) {
    return std::pair(InBackward::apply(t.sin(), &let_go).sin(), t.exp());
  });
  std::tie(a, b) = remat::checkpoint(f, x);
  const Tensor gradient = grad_of(a, {x})[0];
  REQUIRE(alive.size() == 2);
  CHECK(alive[0] - alive[1] == tensor_bytes);  // the result of exp
  CHECK(calls.count() == 2);
  CHECK(bit_equal(gradient, grad_of(x.sin().sin(), {x})[0]));
}

TEST_CASE("what a region's function holds goes when backward has read all that it saved",
          "[rule-4][rule-13]") {
  const Alive alive;
  std::vector<int64_t> counts;
  std::function<void()> note = [&] { counts.push_back(alive.count()); };
  const Tensor x = leaf({tensor_side, tensor_side});
  const Tensor y =
      remat::checkpoint([probe = alive.probe()](const Tensor& t) { return t.sin().exp(); },
                        InBackward::apply(x, &note));
  note();
  const Tensor gradient = grad_of(y, {x})[0];
  CHECK(counts == std::vector<int64_t>{1, 0});  // in the midst of the backward, after the region
  CHECK(bit_equal(gradient, grad_of(x.sin().exp(), {x})[0]));
}

TEST_CASE("a hundred partial gradients on a retained graph leave the bytes flat", "[rule-4]") {
  Tensors leaves;
  for (int i = 0; i < 5; ++i) leaves.push_back(leaf({tensor_side, tensor_side}));
  auto f = [](Tensors t) {
    Tensor h = t[0].sin();
    for (size_t i = 1; i < t.size(); ++i) h = h * t[i].exp();
    return h;
  };
  const Tensors plain = grad_of(f(leaves), leaves);
  Calls calls;
  const Tensor y = remat::checkpoint(counted(calls, f), leaves);
  LiveBytes bytes;
  for (int i = 0; i < 100; ++i) {
    const size_t which = static_cast<size_t>(i) % leaves.size();
    require_bit_equal(grad_of(y, {leaves[which]}, {.retain_graph = true}), {plain[which]});
    REQUIRE(bytes.held() == 0);
    REQUIRE(remat::counters().recomputed_bytes_alive == 0);
  }
  CHECK(calls.count() == 101);
}

TEST_CASE("a backward that fails half way drops what it recomputed", "[rule-4][rule-12]") {
  struct Broken : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  bool fails = true;
  int64_t alive_at_failure = 0;
  std::function<void()> maybe_fail = [&] {
    alive_at_failure = remat::counters().recomputed_bytes_alive;
    if (fails) throw Broken("in backward");
  };
  const Tensor x = leaf({tensor_side, tensor_side});
  auto f = [&](const Tensor& t) {
    return InBackward::apply(t.sin().exp(), &maybe_fail).cos().sin();
  };
  const Tensors plain = grad_of(x.sin().exp().cos().sin(), {x});
  const Tensor y = remat::checkpoint(f, x);
  LiveBytes bytes;
  CHECK_THROWS_AS(grad_of(y, {x}, {.retain_graph = true}), Broken);
  CHECK(alive_at_failure > 0);
  CHECK(bytes.held() == 0);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
  fails = false;
  require_bit_equal(grad_of(y, {x}), plain);
}

TEST_CASE("a nested region's recomputed tensors are dropped like its parent's", "[rule-4]") {
  const Tensor x = leaf({tensor_side, tensor_side});
  auto inner = [](const Tensor& t) { return t.sin().exp().cos(); };
  Calls calls;
  const Tensor y = remat::checkpoint(counted(calls,
                                             [&](Tensor t) {
                                               for (int i = 0; i < 6; ++i)
                                                 t = remat::checkpoint(inner, t);
                                               return t;
                                             }),
                                     x);
  Tensor t = x;
  for (int i = 0; i < 6; ++i) t = inner(t);
  const Tensors plain = grad_of(t, {x});
  t = Tensor();
  Tensors grads;
  LiveBytes bytes;
  for (int i = 1; i <= 2; ++i) {
    bytes.reset_peak();
    grads = grad_of(y, {x}, {.retain_graph = true});
    // Six boundaries, three tensors of one inner region at a time, a few in flight.
    CHECK(bytes.peak() <= (6 + 3 + 6) * tensor_bytes);
    CHECK(bytes.held() == tensor_bytes);
    CHECK(calls.count() == 1 + i);
    CHECK(remat::counters().recomputed_bytes_alive == 0);
    require_bit_equal(grads, plain);
    grads.clear();
  }
}

TEST_CASE("blocks of linear layers peak strictly below plain training", "[rule-4]") {
  constexpr int blocks = 8, layers = 3;
  const Tensor x = at::randn({100, 256});
  std::vector<Tensors> weights(blocks), biases(blocks);
  Tensors all;
  for (int i = 0; i < blocks; ++i) {
    for (int j = 0; j < layers; ++j) {
      weights[i].push_back((at::randn({256, 256}) * 0.05).requires_grad_());
      biases[i].push_back(leaf({256}));
      all.insert(all.end(), {weights[i].back(), biases[i].back()});
    }
  }
  for (const Tensor& p : all) p.mutable_grad() = at::zeros_like(p);
  Calls calls;
  auto train = [&](bool drop) {
    for (const Tensor& p : all) p.mutable_grad().zero_();
    LiveBytes bytes;
    {
      Tensor t = x;
      for (int i = 0; i < blocks; ++i) {
        auto block = [&calls, &w = weights[i], &b = biases[i]](Tensor u) {
          calls();
          for (int j = 0; j < layers; ++j) u = at::linear(u, w[j], b[j]);
          return u;
        };
        t = drop ? remat::checkpoint(block, t) : block(t);
      }
      t.sum().backward();
    }
    Tensors grads;
    const int64_t peak = bytes.peak();
    for (const Tensor& p : all) grads.push_back(p.grad().clone());
    return std::pair(peak, grads);
  };
  const auto [plain_peak, plain] = train(false);
  calls.reset();
  const auto [peak, grads] = train(true);
  CHECK(calls.count() == 2 * blocks);
  CHECK(peak < plain_peak);
  require_bit_equal(grads, plain);
}

}  // namespace
