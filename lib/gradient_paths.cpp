#include "lib/gradient_paths.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <vector>

namespace remat {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;

namespace {

const AccumulateGrad* as_leaf(const Node& node) {
  // All of them have this number, and hardly any other node; casts cost more.
  return node.sequence_nr() == UINT64_MAX ? dynamic_cast<const AccumulateGrad*>(&node) : nullptr;
}

}  // namespace

GradientPlace GradientPlace::of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  const auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr || !tensor.requires_grad()) return {};
  if (const auto& node = tensor.grad_fn(); node != nullptr)
    return {node.get(), static_cast<uint32_t>(tensor.output_nr())};
  return meta->requires_grad_ ? GradientPlace{tensor.unsafeGetTensorImpl(), 0} : GradientPlace{};
}

GradientPlace GradientPlace::of(const Edge& edge) {
  if (!edge.is_valid()) return {};
  const AccumulateGrad* const leaf = as_leaf(*edge.function);
  return leaf == nullptr ? GradientPlace{edge.function.get(), edge.input_nr}
                         : GradientPlace{leaf->variable.unsafeGetTensorImpl(), 0};
}

bool is_leaf(const Node& node) { return as_leaf(node) != nullptr; }

Reached::Reached(const torch::autograd::edge_list& roots,
                 c10::function_ref<bool(const GradientPlace&)> goes_on) {
  std::vector<const Node*> waiting;
  const auto reach = [&](const Edge& edge) {
    if (!edge.is_valid()) return;
    const GradientPlace place = GradientPlace::of(edge);
    const auto [entry, is_new] = visits_.try_emplace(place.at, Visit{edge.function.get(), {}});
    auto& outputs = entry->second.outputs;
    if (std::find(outputs.begin(), outputs.end(), place.output) == outputs.end())
      outputs.push_back(place.output);
    if (is_new && goes_on(place)) waiting.push_back(edge.function.get());
  };
  for (const Edge& root : roots) reach(root);
  while (!waiting.empty()) {
    const Node* const node = waiting.back();
    waiting.pop_back();
    for (const Edge& next : node->next_edges()) reach(next);
  }
}

Node* Reached::node_at(const GradientPlace& place) const {
  const auto found = place.is_somewhere() ? visits_.find(place.at) : visits_.end();
  if (found == visits_.end()) return nullptr;
  const auto& outputs = found->second.outputs;
  return std::find(outputs.begin(), outputs.end(), place.output) == outputs.end()
             ? nullptr
             : found->second.node;
}

}  // namespace remat
