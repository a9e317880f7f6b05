#include "lib/tensor/graph_walk.h"

#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <vector>

#include "lib/seam/autograd_meta.h"
#include "lib/seam/dispatch_mode.h"

namespace remat {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;

namespace {

const AccumulateGrad* as_leaf(const Node& node) {
  // Every AccumulateGrad has this number, and few other nodes do; casts cost more.
  return node.sequence_nr() == UINT64_MAX ? dynamic_cast<const AccumulateGrad*>(&node) : nullptr;
}

uint32_t low_bits(const Node& node) {
  return static_cast<uint32_t>(node.sequence_nr() % UINT32_MAX);
}

}  // namespace

bool has_gradient_edge(const at::Tensor& tensor) {
  return tensor.requires_grad() &&
         (seam::requires_grad_itself(tensor) || tensor.grad_fn() != nullptr);
}

bool has_raw_gradient_edge(const at::Tensor& tensor) {
  return seam::requires_grad_itself(tensor) || seam::node_of(tensor) != nullptr;
}

at::Tensor without_gradient_edge(const at::Tensor& leaf) {
  const seam::DispatchModeOff unseen;
  at::NoGradGuard no_grad;
  return at::alias(leaf);
}

GradRole grad_role_of(const at::Tensor& value) {
  if (!value.defined() || !value.requires_grad()) return GradRole::None;
  if (value.grad_fn() != nullptr) return GradRole::Result;
  return seam::requires_grad_itself(value) ? GradRole::Leaf : GradRole::NoGradViewOfLeaf;
}

GradientPlace GradientPlace::of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  if (!tensor.requires_grad()) return {};
  if (const auto& node = tensor.grad_fn(); node != nullptr)
    return {node.get(), low_bits(*node), static_cast<uint32_t>(tensor.output_nr())};
  return seam::requires_grad_itself(tensor)
             ? GradientPlace{tensor.unsafeGetTensorImpl(), GradientPlace::leaf, 0}
             : GradientPlace{};
}

GradientPlace GradientPlace::of(const Edge& edge) {
  if (!edge.is_valid()) return {};
  const AccumulateGrad* const leaf = as_leaf(*edge.function);
  return leaf == nullptr
             ? GradientPlace{edge.function.get(), low_bits(*edge.function), edge.input_nr}
             : GradientPlace{leaf->variable.unsafeGetTensorImpl(), GradientPlace::leaf, 0};
}

WeakEdge::WeakEdge(const at::Tensor& tensor) : WeakEdge(tensor, grad_role_of(tensor)) {}

WeakEdge::WeakEdge(const at::Tensor& tensor, GradRole role) {
  if (role == GradRole::Leaf) {
    place_ = {tensor.unsafeGetTensorImpl(), GradientPlace::leaf, 0};
    leaf_ = WeakTensor(tensor.getIntrusivePtr());
  } else if (role == GradRole::Result) {
    const auto& node = tensor.grad_fn();
    place_ = {node.get(), low_bits(*node), static_cast<uint32_t>(tensor.output_nr())};
  }
}

at::Tensor WeakEdge::leaf() const {
  if (place_.sequence != GradientPlace::leaf) return {};
  auto alive = leaf_.lock();
  return alive ? at::Tensor(std::move(alive)) : at::Tensor();
}

bool is_leaf(const Node& node) { return as_leaf(node) != nullptr; }

Reached::Reached(const torch::autograd::edge_list& roots,
                 c10::function_ref<bool(const GradientPlace&)> goes_on, uint64_t least) {
  std::vector<const Node*> waiting;
  const auto reach = [&](const Edge& edge) {
    if (!edge.is_valid() || (least > 0 && edge.function->topological_nr() < least)) return;
    const GradientPlace place = GradientPlace::of(edge);
    Visit& visit =
        visits_.try_emplace(place.at, Visit{edge.function.get(), place.sequence, false, {}})
            .first->second;
    auto& outputs = visit.outputs;
    if (std::find(outputs.begin(), outputs.end(), place.output) == outputs.end())
      outputs.push_back(place.output);
    if (visit.is_passed || !goes_on(place)) return;
    visit.is_passed = true;
    waiting.push_back(edge.function.get());
  };
  for (const Edge& root : roots) reach(root);
  while (!waiting.empty()) {
    const Node* const node = waiting.back();
    waiting.pop_back();
    for (const Edge& next : node->next_edges()) reach(next);
  }
}

Reached Reached::towards(const torch::autograd::edge_list& targets,
                         const torch::autograd::edge_list& roots) {
  uint64_t least = UINT64_MAX;
  for (const Edge& target : targets)
    least = std::min(least, target.is_valid() ? target.function->topological_nr() : 0);
  return Reached(roots, everywhere, least);
}

Node* Reached::node_at(const GradientPlace& place) const {
  const auto found = place.is_somewhere() ? visits_.find(place.at) : visits_.end();
  if (found == visits_.end() || found->second.sequence != place.sequence) return nullptr;
  const auto& outputs = found->second.outputs;
  return std::find(outputs.begin(), outputs.end(), place.output) == outputs.end()
             ? nullptr
             : found->second.node;
}

}  // namespace remat
