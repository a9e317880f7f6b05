#pragma once
// Autograd Functions that save something, each in another way.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace remat::testing {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct SavesInput : torch::autograd::Function<SavesInput> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    ctx->save_for_backward({x});
    return x.sin();
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    return {g[0] * ctx->get_saved_variables()[0].cos()};
  }
};

struct SavesOutput : torch::autograd::Function<SavesOutput> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    Tensor y = x.tanh();
    ctx->save_for_backward({y});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    const Tensor y = ctx->get_saved_variables()[0];
    return {g[0] * (1 - y * y)};
  }
};

/// Saves its output, as LibTorch's exp does.
struct SavesExp : torch::autograd::Function<SavesExp> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    const Tensor y = x.exp();
    ctx->save_for_backward({y});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    return {g[0] * ctx->get_saved_variables()[0]};
  }
};

struct ReadsTwice : torch::autograd::Function<ReadsTwice> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    const Tensor inner = x.cos();
    ctx->save_for_backward({x, inner});
    return x * inner;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    const variable_list first = ctx->get_saved_variables(), second = ctx->get_saved_variables();
    return {g[0] * (second[1] - first[0] * second[0].sin()) + (first[1] - second[1])};
  }
};

/// Keeps a mask that no hook sees.
struct KeepsMask : torch::autograd::Function<KeepsMask> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    const Tensor mask = x > 0;
    ctx->saved_data["mask"] = mask;
    ctx->save_for_backward({x});
    return x * mask * x;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    return {2 * g[0] * ctx->get_saved_variables()[0] * ctx->saved_data["mask"].toTensor()};
  }
};

struct ChangesInput : torch::autograd::Function<ChangesInput> {
  static Tensor forward(AutogradContext* ctx, Tensor x) {
    x.tanh_();
    ctx->mark_dirty({x});
    ctx->save_for_backward({x});
    return x;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    const Tensor y = ctx->get_saved_variables()[0];
    return {g[0] * (1 - y * y)};
  }
};

}  // namespace remat::testing
