#include "lib/frame/gradient_sinks.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "lib/seam/autograd_meta.h"
#include "lib/tensor/graph_walk.h"

namespace remat {

namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;

constexpr char through_outside[] =
    "a backward inside a region accumulated into an outside leaf through a captured tensor";
constexpr char with_hooks[] =
    "a gradient was taken inside a region with respect to a captured leaf that has hooks, and "
    "another backward of the region accumulates into that leaf";

template <class Visitor>
void visit_leaves_below(const edge_list& roots, Visitor&& visitor) {
  seam::visit_nodes(roots, [&](const seam::NodePtr& node) {
    if (is_leaf(*node))
      visitor(static_cast<const torch::autograd::AccumulateGrad&>(*node).variable);
  });
}

}  // namespace

void AccumulatedLeaves::add_below(const edge_list& roots) {
  visit_leaves_below(roots, [this](const at::Tensor& leaf) {
    if (leaf.defined() && !contains(leaf.unsafeGetTensorImpl()))
      leaves_.emplace_back(leaf.getIntrusivePtr());
  });
}

bool AccumulatedLeaves::contains(const c10::TensorImpl* leaf) const {
  return std::any_of(leaves_.begin(), leaves_.end(),
                     [leaf](const WeakTensor& each) { return each._unsafe_get_target() == leaf; });
}

const seam::NodePtr* GradientSinks::sink_of(const at::TensorBase& tensor) {
  if (!seam::requires_grad_itself(tensor) || seam::node_of(tensor) != nullptr) return nullptr;
  c10::TensorImpl* const leaf = tensor.unsafeGetTensorImpl();
  if (!leaves_.contains(leaf)) return nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto [found, is_new] = sinks_.try_emplace(leaf);
  if (is_new) {
    found->second.has_hooks = seam::has_own_hooks(tensor);
    found->second.node = seam::make_node<seam::EndNode>("remat::GradientSink");
    found->second.node->add_input_metadata(at::Tensor(tensor));
  }
  return &found->second.node;
}

const char* GradientSinks::against(const edge_list& roots, const edge_list& targets,
                                   bool accumulates) {
  if (accumulates) {
    bool reaches_leaf = false;
    visit_leaves_below(roots, [&](const at::Tensor& leaf) {
      reaches_leaf = reaches_leaf || leaves_.contains(leaf.unsafeGetTensorImpl());
    });
    return reaches_leaf ? through_outside : nullptr;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [leaf, sink] : sinks_)
    if (sink.has_hooks && std::any_of(targets.begin(), targets.end(),
                                      [&](const Edge& each) { return each.function == sink.node; }))
      return with_hooks;
  return nullptr;
}

}  // namespace remat
