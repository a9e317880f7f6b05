#include "lib/seam/saved_of_node.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <exception>

namespace remat::seam {

SavedOfNode saved_of(const decltype(torch::autograd::Edge::function)& node) {
  namespace compiled = torch::dynamo::autograd;
  compiled::AutogradCompilerCall call(compiled::SizeInput::STATIC);
  compiled::NodeCall node_call(0, node);
  SavedOfNode saved;
  try {
    compiled::CompiledNodeArgs args(call, node_call);
    node->compiled_args(args);
  } catch (const std::exception&) {
    saved.is_known = false;
  }
  for (const at::Tensor& tensor : call.tensor_args.inputs) saved.tensors.push_back(tensor);
  return saved;
}

}  // namespace remat::seam
