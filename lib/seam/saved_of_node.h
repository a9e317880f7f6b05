#pragma once
// The tensors that a node of the graph saved.
//
// Note [What a node saved]
// LibTorch has no list of a node's saved variables in C++. But each node can report its arguments
// to compiled autograd (Node::compiled_args), which unpacks every saved variable of it. Meanwhile
// our hooks note the tensors that they hold and return empty stand-ins (hooks/pack/inspection.h),
// so nothing is computed. The tensors of a node that cannot do so are unknown.

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
