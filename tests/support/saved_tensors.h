#pragma once
// Reads the saved tensors of autograd's generated nodes: `read_saved(y, &SinBackward0::self_)`.

#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "tests/support/support.h"

namespace remat::testing {

namespace nodes = torch::autograd::generated;

/// Returns the node that made `y`, as its generated class; fails the test if it is of another
/// class.
template <class NodeType>
NodeType& node_of(const Tensor& y) {
  auto* node = dynamic_cast<NodeType*>(y.grad_fn().get());
  if (node == nullptr) FAIL("the node is " << (y.grad_fn() ? y.grad_fn()->name() : "null"));
  return *node;
}

/// Returns the saved variable itself, for `register_hooks` and the like.
template <class NodeType>
torch::autograd::SavedVariable& saved_of(const Tensor& y,
                                         torch::autograd::SavedVariable NodeType::* member) {
  return node_of<NodeType>(y).*member;
}

/// Unpacks a saved input of the node that made `y`: a read outside backward.
template <class NodeType>
Tensor read_saved(const Tensor& y, torch::autograd::SavedVariable NodeType::* member) {
  return saved_of(y, member).unpack();
}

/// Unpacks a saved output, which needs its node.
template <class NodeType>
Tensor read_saved_output(const Tensor& y, torch::autograd::SavedVariable NodeType::* member) {
  return saved_of(y, member).unpack(y.grad_fn());
}

}  // namespace remat::testing
