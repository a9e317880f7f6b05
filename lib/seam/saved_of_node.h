#pragma once
// The tensors that a node of the graph saved.
//
// Note [What a node saved]
// LibTorch has no list of a node's saved variables in C++. But each node can tell compiled autograd
// its arguments (Node::compiled_args), which unpacks every saved variable of it. While it does, our
// hooks note what they hold and hand out empty stand-ins (hooks/pack/inspection.h), so nothing is
// computed. A node that cannot do so is not known.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <vector>

namespace remat::seam {

struct SavedOfNode {
  std::vector<at::Tensor> tensors;
  bool is_known = true;
};
SavedOfNode saved_of(const decltype(torch::autograd::Edge::function)& node);

}  // namespace remat::seam
