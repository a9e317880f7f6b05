#pragma once
// Calls a function when a leaf's gradient is complete, as plain autograd accumulates it.

#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

class Accumulation {
 public:
  Accumulation(const torch::Tensor& leaf, std::function<void()> call)
      : node_(torch::autograd::impl::grad_accumulator(leaf)) {
    using Tensors = std::vector<torch::Tensor>;
    node_->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [call = std::move(call)](const Tensors& outputs, const Tensors&) {
          call();
          return outputs;
        }));
  }

 private:
  // Owned here: the leaf refers to its node only weakly, and the hook dies with the node.
  decltype(torch::autograd::Edge::function) node_;
};
