// The operators that are autograd Functions of their own, or register hooks on tensors.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "remat/remat.h"
#include "tests/fuzz/operators.h"
#include "tests/support/saving_functions.h"

namespace fuzz {

namespace {

using remat::testing::ChangesInput;
using remat::testing::KeepsMask;
using remat::testing::ReadsTwice;
using remat::testing::SavesInput;
using remat::testing::SavesOutput;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct SavesAll : Function<SavesAll> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    const Tensor inner = x.sigmoid();
    Tensor y = inner * x;
    ctx->save_for_backward({inner, x, y, x});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    const variable_list saved = ctx->get_saved_variables();
    return {g[0] * (saved[0] + saved[2] * (1 - saved[0])) + saved[3] - saved[1]};
  }
};

struct TwoOutputs : Function<TwoOutputs> {
  static variable_list forward(AutogradContext* ctx, const Tensor& a, const Tensor& b) {
    const Tensor order = a > b;
    Tensor product = a * b, exponential = (a - b).clamp(-3, 3).exp();
    ctx->mark_non_differentiable({order});
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({a, b, exponential});
    return {product, exponential, order};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    const variable_list saved = ctx->get_saved_variables();
    Tensor left, right;
    if (g[0].defined()) {
      left = g[0] * saved[1];
      right = g[0] * saved[0];
    }
    if (g[1].defined()) {
      const Tensor step = g[1] * saved[2] * ((saved[0] - saved[1]).abs() < 3);
      left = left.defined() ? left + step : step;
      right = right.defined() ? right - step : -step;
    }
    return {left, right};
  }
};

/// Runs in its backward another backward, through a region.
struct BackwardInBackward : Function<BackwardInBackward> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    ctx->save_for_backward({x});
    return x.sin().exp();
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    at::AutoGradMode grad_mode(true);
    const Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_();
    const Tensor y = remat::checkpoint([](const Tensor& t) { return t.sin().exp(); }, x);
    return torch::autograd::grad({y}, {x}, {g[0].detach()});
  }
};

Tensor gradient_of_region(const Tensor& g) {
  at::AutoGradMode grad_mode(true);
  const Tensor x = g.detach().clamp(-2, 2).requires_grad_();
  const Tensor y = remat::checkpoint([](const Tensor& t) { return t.sin().exp() * t; }, x);
  return torch::autograd::grad({y.sum()}, {x})[0];
}

template <class F>
auto function() {
  return [](const Tensors& a, Dice&, const Surroundings&) -> Tensors {
    return {F::apply(floating(a[0]))};
  };
}

}  // namespace

void add_functions(std::vector<Operator>& t) {
  t.push_back({"SavesInput", 1, 1, function<SavesInput>()});
  t.push_back({"SavesOutput", 1, 1, function<SavesOutput>()});
  t.push_back({"SavesAll", 1, 1, function<SavesAll>()});
  t.push_back({"ReadsTwice", 1, 1, function<ReadsTwice>()});
  t.back().reads_twice = true;
  t.push_back({"KeepsMask", 1, 1, function<KeepsMask>()});
  // Not on a view: LibTorch then makes a cycle of the node and its saved output.
  t.push_back({"ChangesInput", 1, 1, [](const Tensors& a, Dice&, const Surroundings&) -> Tensors {
                 const Tensor x = floating(a[0]);
                 return {ChangesInput::apply(x.is_view() ? x.clone() : x)};
               }});
  t.back().inplace = t.back().asks_if_view = true;
  t.push_back({"TwoOutputs", 2, 3, [](const Tensors& a, Dice&, const Surroundings&) {
                 const Tensor x = line(floating(a[0]));
                 const Tensor y = floating(a[1]).to(x.scalar_type()).mean() * x.detach().cos();
                 return TwoOutputs::apply(x, y);
               }});
  t.push_back({"BackwardInBackward", 1, 1, function<BackwardInBackward>()});
  t.back().backward_in_hook = true;
  t.push_back({"hook", 1, 1, [](const Tensors& a, Dice&, const Surroundings& around) {
                 Tensor y = floating(a[0]) * 2;
                 if (y.requires_grad()) {
                   y.register_hook([calls = around.hook_calls](const Tensor& g) {
                     ++*calls;
                     return g * 2;
                   });
                 }
                 return Tensors{y};
               }});
  t.push_back({"hook_with_backward", 1, 1, [](const Tensors& a, Dice&, const Surroundings&) {
                 Tensor y = floating(a[0]) * 2;
                 if (y.requires_grad()) {
                   y.register_hook([](const Tensor& g) { return g * gradient_of_region(g); });
                 }
                 return Tensors{y};
               }});
  t.back().backward_in_hook = true;
  t.back().weight = 1;
}

}  // namespace fuzz
