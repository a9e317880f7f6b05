// Functions with gradient rules of their own: custom_function.h.

#include "remat/custom_function.h"

#include <torch/csrc/autograd/forward_grad.h>

#include "tests/support/autocast.h"
#include "tests/support/support.h"

using remat::custom_function;
using remat::CustomRule;
using Kind = remat::CheckpointError::Kind;

namespace {

constexpr int64_t num_rows = 64, width = 8;

Tensor scores_of(const Tensors& inputs) {
  return at::matmul(inputs[0], inputs[1].t()) / std::sqrt(static_cast<double>(width));
}

/// An attention that keeps the log-sum-exp of its scores.
struct Attention {
  Calls forwards, rebuilds;

  CustomRule rule() {
    return {.forward = [this](const Tensors& inputs) -> CustomRule::Result {
              forwards();
              const Tensor scores = scores_of(inputs);
              const Tensor sums = scores.logsumexp(-1, true);
              return {{(scores - sums).exp().matmul(inputs[2])}, {sums}};
            },
            .rematerialize = [this](const Tensors& small, const Tensors& inputs) -> Tensors {
              rebuilds();
              return {inputs[0], inputs[1], inputs[2], (scores_of(inputs) - small[0]).exp()};
            },
            .backward = backward};
  }
  static Tensors backward(const Tensors& saved, const Tensors& gradients) {
    const Tensor &p = saved[3], &g = gradients[0];
    const Tensor dp = g.matmul(saved[2].t());
    const Tensor ds = p * (dp - (dp * p).sum(-1, true)) / std::sqrt(static_cast<double>(width));
    return {ds.matmul(saved[1]), ds.t().matmul(saved[0]), p.t().matmul(g)};
  }
};

/// The same formula over probabilities that autograd keeps.
struct KeepingAttention : torch::autograd::Function<KeepingAttention> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& q, const Tensor& k,
                        const Tensor& v) {
    const Tensor scores = scores_of({q, k, v});
    const Tensor p = (scores - scores.logsumexp(-1, true)).exp();
    context->save_for_backward({q, k, v, p});
    return p.matmul(v);
  }
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    return Attention::backward(context->get_saved_variables(), gradients);
  }
};

Tensors new_inputs(at::ScalarType dtype = at::kFloat) {
  return {leaf({num_rows, width}, dtype), leaf({num_rows, width}, dtype),
          leaf({num_rows, width}, dtype)};
}

Tensor plain_attention(const Tensors& inputs) {
  return scores_of(inputs).softmax(-1).matmul(inputs[2]);
}

/// x -> sin(x), whose rule keeps what `small` gives and rebuilds cos(x).
CustomRule sine(std::function<Tensors(const Tensor& x)> small) {
  return {.forward = [small](const Tensors& inputs) -> CustomRule::Result {
            return {{inputs[0].sin()}, small(inputs[0])};
          },
          .rematerialize = [](const Tensors&, const Tensors& inputs) -> Tensors {
            return {inputs[0].cos()};
          },
          .backward = [](const Tensors& saved, const Tensors& gradients) -> Tensors {
            return {saved[0] * gradients[0]};
          }};
}
const CustomRule plain_sine = sine([](const Tensor&) { return Tensors{}; });

}  // namespace

TEST_CASE("a rule rebuilds in backward, and the graph keeps the inputs and small tensors",
          "[custom]") {
  const Tensors inputs = new_inputs();
  const Tensors expected =
      grad_of(KeepingAttention::apply(inputs[0], inputs[1], inputs[2]), inputs);
  Attention attention;
  const CustomRule rule = attention.rule();
  LiveBytes bytes;
  Tensor y = custom_function(rule, inputs)[0];
  CHECK(bytes.held() == 4 * (num_rows * width + num_rows));  // the result and the sums
  CHECK(attention.rebuilds.count() == 0);
  for (int64_t i = 1; i <= 2; ++i) {
    require_bit_equal(grad_of(y, inputs, {.retain_graph = true}), expected);
    CHECK(attention.rebuilds.count() == i);
  }
  CHECK(attention.forwards.count() == 1);
  y = Tensor();
  CHECK(bytes.held() == 0);
}

TEST_CASE("a rule is differentiated to any order", "[custom]") {
  const Tensors inputs = new_inputs(at::kDouble);
  Attention attention;
  const CustomRule rule = attention.rule();
  const auto orders = [&](const Tensor& y) {
    const Tensors first = grad_of(y.sin(), inputs, {.create_graph = true});
    const Tensors second =
        grad_of((first[0] * first[1]).exp() + first[2], inputs, {.create_graph = true});
    const Tensors third = grad_of(second[0] + second[1] * second[2], inputs);
    Tensors all = first;
    all.insert(all.end(), second.begin(), second.end());
    all.insert(all.end(), third.begin(), third.end());
    return all;
  };
  const Tensors found = orders(custom_function(rule, inputs)[0]);
  const Tensors expected = orders(plain_attention(inputs));
  for (std::size_t i = 0; i < expected.size(); ++i)
    CHECK(at::allclose(found[i], expected[i], 1e-9, 1e-11));
  CHECK(attention.forwards.count() == 3);
}

TEST_CASE("a rule works in regions, nested, and under hooks", "[custom]") {
  const Tensors inputs = new_inputs();
  Attention attention;
  const CustomRule rule = attention.rule();
  const auto f = [&](const Tensors& t) {
    return custom_function(rule, {t[0].sin(), t[1].cos(), t[2]})[0].tanh();
  };
  const Tensors expected = grad_of(f(inputs), inputs);
  require_bit_equal(grad_of(remat::checkpoint(f, inputs), inputs), expected);
  const auto outer = [&](const Tensors& t) { return remat::checkpoint(f, t) * 1; };
  require_bit_equal(grad_of(remat::checkpoint(outer, inputs), inputs), expected);
  Tensor y;
  {
    const remat::SavedTensorHooksGuard hooks([](const Tensor& t) { return t.clone(); },
                                             [](const Tensor& t) { return t; });
    y = f(inputs);
  }
  require_bit_equal(grad_of(y, inputs), expected);
  const Tensors twice =
      grad_of(grad_of(remat::checkpoint(f, inputs), inputs, {.create_graph = true})[0], inputs);
  require_bit_equal(twice, grad_of(grad_of(f(inputs), inputs, {.create_graph = true})[0], inputs));
}

TEST_CASE("rematerialize sees forward's autocast, and backward the caller's", "[custom]") {
  const Tensors inputs = new_inputs();
  std::vector<at::ScalarType> seen;
  CustomRule rule = Attention().rule();
  rule.forward = [](const Tensors& given) -> CustomRule::Result {
    const Tensor scores = scores_of(given);
    return {{scores.softmax(-1).matmul(given[2])}, {scores.logsumexp(-1, true)}};
  };
  rule.rematerialize = [&](const Tensors& small, const Tensors& given) -> Tensors {
    seen.push_back(at::matmul(given[0], given[1].t()).scalar_type());
    return {given[0], given[1], given[2], (scores_of(given) - small[0]).exp().to(at::kFloat)};
  };
  rule.backward = [&](const Tensors& saved, const Tensors& gradients) {
    seen.push_back(at::matmul(saved[0], saved[1].t()).scalar_type());
    return Attention::backward(saved, {gradients[0].to(at::kFloat)});
  };
  Tensor y;
  {
    const Autocast autocast;
    y = custom_function(rule, inputs)[0];
  }
  grad_of(y, inputs);
  CHECK(seen == std::vector<at::ScalarType>{at::kBFloat16, at::kFloat});
}

TEST_CASE("small tensors that forward does not give again refuse a second derivative", "[custom]") {
  const Tensor x = leaf({32});
  const auto second_of = [&](const CustomRule& rule) {
    return grad_of(grad_of(custom_function(rule, {x})[0], {x}, {.create_graph = true})[0], {x});
  };
  require_bit_equal(second_of(plain_sine), {-x.sin()});
  const auto refused = [&](std::function<Tensors(const Tensor& t)> small) {
    const auto error = error_of<remat::CheckpointError>([&] { second_of(sine(small)); });
    CHECK(error.kind() == Kind::Unsupported);
    return text_of(error);
  };
  CHECK_THAT(refused([](const Tensor& t) { return Tensors{at::rand_like(t) * t}; }),
             contains("gave other small tensors when it ran again"));
  CHECK_THAT(refused([](const Tensor& t) { return Tensors{at::rand_like(t) > 0.5}; }),
             contains("gave other small tensors when it ran again"));
  CHECK_THAT(refused([](const Tensor& t) { return Tensors{t.detach().exp()}; }),
             contains("gave a small tensor without a gradient"));
  // Without a second derivative they are fine, and a mask needs no gradient.
  const auto mask = [](const Tensor& t) { return Tensors{t > 0}; };
  require_bit_equal(second_of(sine(mask)), {-x.sin()});
  const CustomRule detached = sine([](const Tensor& t) { return Tensors{t.detach().exp()}; });
  require_bit_equal(grad_of(custom_function(detached, {x})[0], {x}), {x.cos()});
}

TEST_CASE("wrong rules are refused", "[custom]") {
  const Tensor x = leaf({4});
  CHECK_THROWS_WITH(custom_function({}, {x}), contains("the rule has an empty function"));
  CustomRule rule = plain_sine;
  rule.backward = [](const Tensors&, const Tensors&) { return Tensors(2); };
  CHECK_THROWS_WITH(grad_of(custom_function(rule, {x})[0], {x}),
                    contains("backward returned 2 gradients for 1 inputs"));
  rule.rematerialize = [](const Tensors&, const Tensors&) -> Tensors {
    throw std::runtime_error("no");
  };
  CHECK_THROWS_WITH(grad_of(custom_function(rule, {x})[0], {x}), "no");
}

TEST_CASE("an input that changed in place before backward is an error", "[custom]") {
  const Tensor x = leaf({4}), y = x * 2;
  const Tensor z = custom_function(plain_sine, {y})[0];
  y.mul_(2);
  CHECK_THROWS_WITH(grad_of(z, {x}), contains("modified by an inplace operation"));
}

TEST_CASE("without gradients, and with tangents, only forward runs", "[custom]") {
  const Tensor x = leaf({4});
  int64_t forwards = 0;
  CustomRule rule = plain_sine;
  rule.forward = [&](const Tensors& inputs) -> CustomRule::Result {
    ++forwards;
    return {{inputs[0].sin()}, {}};
  };
  {
    const at::NoGradGuard no_grad;
    CHECK_FALSE(custom_function(rule, {x})[0].requires_grad());
  }
  CHECK_FALSE(custom_function(rule, {x.detach()})[0].requires_grad());
  const uint64_t level = torch::autograd::ForwardADLevel::get_next_idx();
  {
    const Tensor dual = at::_make_dual(x, at::ones({4}), static_cast<int64_t>(level));
    const Tensor y = custom_function(rule, {dual})[0];
    require_bit_equal({y._fw_grad(static_cast<int64_t>(level))}, {x.cos()});
    require_bit_equal(grad_of(y, {x}), {x.cos()});
  }
  torch::autograd::ForwardADLevel::release_idx(level);
  CHECK(forwards == 3);
}

TEST_CASE("several outputs, of which backward reaches one, and inputs without a gradient",
          "[custom]") {
  const Tensor x = leaf({4}), factor = at::randn({4});
  Tensors received;
  const CustomRule rule{
      .forward = [](const Tensors& inputs) -> CustomRule::Result {
        const Tensor y = inputs[0] * inputs[1];
        return {{y, y.exp()}, {}};
      },
      .rematerialize = [](const Tensors&, const Tensors& inputs) { return inputs; },
      .backward = [&](const Tensors& saved, const Tensors& gradients) -> Tensors {
        received = gradients;
        return {gradients[0] * saved[1] + gradients[1] * (saved[0] * saved[1]).exp() * saved[1],
                Tensor()};
      }};
  const Tensors outputs = custom_function(rule, {x, factor});
  require_bit_equal(grad_of(outputs[0], {x}), {factor});
  require_bit_equal(received, {at::ones({4}), at::zeros({4})});
}
