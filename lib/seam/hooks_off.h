#pragma once
// Removes the hooks of a leaf for a while.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <vector>

#include "lib/seam/variable_hooks.h"

namespace remat::seam {

/// Removes the hooks of a leaf, and of the node that accumulates its gradient, for its lifetime: a
/// backward calls no code of the program there. Hooks registered meanwhile are lost afterwards. One
/// thread.
class HooksOff {
 public:
  HooksOff(at::Tensor leaf, NodePtr accumulator);
  ~HooksOff() { exchange(); }
  HooksOff& operator=(HooksOff&&) = delete;

 private:
  template <class Hook>
  using Hooks = std::vector<std::unique_ptr<Hook>>;

  void exchange() noexcept;

  const at::Tensor leaf_;
  const NodePtr accumulator_;
  Hooks<torch::autograd::FunctionPreHook> of_tensor_{}, before_node_{};
  Hooks<torch::autograd::FunctionPostHook> after_node_{};
  std::shared_ptr<torch::autograd::hooks_list> registered_{};
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> after_accumulation_{};
};

}  // namespace remat::seam
