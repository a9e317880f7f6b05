// The modes: the uses of forward's results.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <exception>
#include <thread>

#include "tests/table/run.h"

namespace table {

namespace {

void backward(Run& run) {
  run.step("backward", [&] {
    Tensors weights;
    for (const Tensor& output : run.outputs()) weights.push_back(weights_of(output));
    if (!weights.empty()) torch::autograd::backward(run.outputs(), weights);
    for (const Tensor& input : run.inputs()) run.note("gradient", input.grad());
  });
}

void grad_thrice(Run& run) {
  for (const char* const label : {"first", "second", "third"})
    run.step(label, [&] {
      run.note("gradient", grad(run.outputs(), run.inputs(), /*retains=*/true, /*creates=*/false));
    });
}

Tensor sum_of_squares(const Tensors& tensors) {
  Tensor sum;
  for (const Tensor& tensor : differentiable(tensors)) {
    const Tensor part = tensor.is_complex() ? at::real(tensor * tensor.conj()).sum()
                                            : (tensor * tensor).to(at::kDouble).sum();
    sum = sum.defined() ? sum + part.to(at::kDouble) : part.to(at::kDouble);
  }
  return sum;
}

/// Differentiates: each order is the gradient of the sum of squares of the order before.
void differentiate(Run& run, int orders) {
  Tensors gradients;
  for (int order = 1; order <= orders; ++order)
    run.step("order " + std::to_string(order), [&] {
      const Tensor sum = order == 1 ? Tensor() : sum_of_squares(gradients);
      if (order > 1 && !sum.defined()) return;
      const Tensors outputs = order == 1 ? run.outputs() : Tensors{sum};
      gradients = grad(outputs, run.inputs(), order < orders, order < orders);
      run.note("gradient", gradients);
    });
}

/// Returns every other of the outputs or inputs, from the first or the second on.
Tensors half_of(const Tensors& all, std::size_t first) {
  Tensors half;
  for (std::size_t i = first; i < all.size(); i += 2) half.push_back(all[i]);
  return half;
}

void partial(Run& run) {
  for (const std::size_t output : {0, 1})
    for (const std::size_t input : {1, 0})
      run.step("outputs " + std::to_string(output) + ", inputs " + std::to_string(input), [&] {
        run.note("gradient", grad(half_of(run.outputs(), output), half_of(run.inputs(), input),
                                  /*retains=*/true, /*creates=*/false));
      });
  run.step("backward with inputs", [&] {
    const Tensors inputs = half_of(run.inputs(), 0);
    Tensors weights;
    for (const Tensor& output : run.outputs()) weights.push_back(weights_of(output));
    if (!weights.empty() && !inputs.empty())
      torch::autograd::backward(run.outputs(), weights, /*retain_graph=*/false,
                                /*create_graph=*/false, inputs);
    for (const Tensor& input : run.inputs()) run.note("gradient", input.grad());
  });
}

void threads(Run& run) {
  run.step("two threads", [&] {
    Tensors gradients[2];
    std::exception_ptr errors[2];
    auto differentiate_on_thread = [&](int which) {
      try {
        gradients[which] = grad(run.outputs(), run.inputs(), /*retains=*/true, /*creates=*/false);
      } catch (...) {
        errors[which] = std::current_exception();
      }
    };
    std::thread other(differentiate_on_thread, 1);
    std::thread one(differentiate_on_thread, 0);
    one.join();
    other.join();
    std::thread([graph = run.release_graph()]() mutable { graph.clear(); }).join();
    for (const std::exception_ptr& error : errors)
      if (error) std::rethrow_exception(error);
    run.note("gradient of one thread", gradients[0]);
    run.note("gradient of the other", gradients[1]);
  });
}

/// Returns a body that takes a gradient of its results and continues with it.
Body with_backward_inside(Body body) {
  return [body = std::move(body)](const Tensors& args) {
    Tensors made = args;
    for (Tensor& tensor : made)
      if (tensor.defined() && tensor.requires_grad() && tensor.layout() == at::kStrided)
        tensor = tensor * 1;
    const Tensors sources = differentiable(made);
    Tensors results = body(made);
    Tensor factor = at::ones({}, at::kDouble);
    for (const Tensor& gradient : grad(differentiable(results), sources, true, false))
      if (gradient.defined()) factor = factor + at::real(gradient.to_dense()).sum() * 0.125;
    for (Tensor& result : results)
      if (result.defined() && result.requires_grad() && result.layout() == at::kStrided)
        result = result * factor.to(c10::toRealValueType(result.scalar_type()));
    return results;
  };
}

}  // namespace

const std::vector<Mode>& modes() {
  static const std::vector<Mode> all{
      {"backward", backward},
      {"grad_thrice", grad_thrice},
      {"second_order", [](Run& run) { differentiate(run, 2); }},
      {"third_order", [](Run& run) { differentiate(run, 3); }},
      {"partial", partial},
      {"threads", threads},
      {"backward_inside", grad_thrice, with_backward_inside},
      {"no_backward", [](Run&) {}},
  };
  return all;
}

}  // namespace table
