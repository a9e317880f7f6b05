#include "lib/selective/kept_gradients.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "lib/base/error.h"
#include "lib/frame/frame_scope.h"
#include "lib/frame/mismatch.h"
#include "lib/selective/operator_handler.h"
#include "lib/tensor/graph_walk.h"

namespace remat {

namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;

constexpr char cause[] = "pin and save_region keep a value, not how it was computed";
constexpr char advice[] =
    "compute what is differentiated inside the region again: leave pin or save_region away for it";

template <class T>
bool contains(const std::vector<T>& all, const T& one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

[[noreturn]] void refuse(const Region& region, const char* fact) {
  throw_unsupported(region, fact, cause, advice);
}

/// The node of a kept value. It throws, since a recompute must not be differentiated through a
/// value that it did not compute.
struct KeptEdge final : Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    constexpr char fact[] = "a gradient was taken, inside a recompute, through a kept value";
    detail::visit_regions([&](detail::RegionScope& scope) {
      if (!scope.is_recompute || scope.is_save_region) return;
      try {
        refuse(static_cast<FrameScope&>(scope).frame().region(), fact);
      } catch (...) {
        if (OperatorHandler* const replay = scope.operators()) replay->note_mismatch();
        throw;
      }
    });
    throw_unsupported(fact, cause, advice);  // its graph has outlived the recompute
  }
  std::string name() const override { return "remat::KeptEdge"; }
};

}  // namespace

KeptHistory history_of(const at::Tensor& value, std::size_t num_owners,
                       const std::vector<GradientPlace>& known, const RegionStart& start,
                       std::vector<WeakTensor>& leaves) {
  KeptHistory history;
  if (!value.defined() || !has_gradient_edge(value)) return history;
  history.has_hooks = !torch::autograd::impl::hooks(value).empty();
  history.is_shared = history.is_open = value.use_count() > num_owners;
  if (value.grad_fn() == nullptr) return history;
  edge_list waiting{torch::autograd::impl::gradient_edge(value)};
  std::unordered_set<const Node*> seen;
  while (!waiting.empty()) {
    const Edge edge = std::move(waiting.back());
    waiting.pop_back();
    if (!edge.is_valid() || contains(known, GradientPlace::of(edge))) continue;
    const Node& node = *edge.function;
    if (is_leaf(node))
      leaves.emplace_back(static_cast<const AccumulateGrad&>(node).variable.getIntrusivePtr());
    else if (node.sequence_nr() < start.sequence || node.thread_id() != start.thread)
      history.is_open = true;
    else if (seen.insert(&node).second)
      waiting.insert(waiting.end(), node.next_edges().begin(), node.next_edges().end());
  }
  return history;
}

const KeptGradients::Variable& KeptGradients::original_of(const at::Tensor& given) {
  const Edge edge = torch::autograd::impl::gradient_edge(given);
  for (const Variable& each : variables_)
    if (each.edge == edge) return each;
  variables_.push_back({edge, variables_.size(), {}, WeakTensor(given.getIntrusivePtr())});
  return variables_.back();
}

at::Tensor KeptGradients::give(const at::Tensor& data, GradRole role, KeptHistory history,
                               const std::vector<at::Tensor>& read,
                               const std::vector<at::Tensor>& more_sources) {
  at::Tensor kept = data.tensor_data();
  if (role == GradRole::None) return kept;
  if (role == GradRole::NoGradViewOfLeaf)
    return without_gradient_edge(kept.set_requires_grad(true));
  std::size_t number = variables_.size();
  edge_list edges;
  for (const auto* const sources : {&read, &more_sources})
    for (const at::Tensor& each : *sources)
      if (each.defined() && has_gradient_edge(each))
        edges.push_back(torch::autograd::impl::gradient_edge(each));
  if (history.is_argument) {
    if (has_gradient_edge(read.front())) {
      const Variable& original = original_of(read.front());
      number = original.number;
      history.is_shared = original.history.is_shared;
      history.is_open = original.history.is_open;
      // The edges lead to the argument's sources; the argument's own uses beside the value are
      // checked separately.
      const edge_list below = edges.front().function->next_edges();
      edges.erase(edges.begin());
      edges.insert(edges.end(), below.begin(), below.end());
    } else {
      history.is_shared = history.is_open = true;
    }
  }
  if (role == GradRole::Leaf) {
    kept.set_requires_grad(true);
  } else {
    auto node = seam::make_node<KeptEdge>();
    node->set_next_edges(std::move(edges));
    torch::autograd::create_gradient_edge(kept, std::move(node));
  }
  variables_.push_back({torch::autograd::impl::gradient_edge(kept), number, history});
  return kept;
}

// A kept value that is no leaf has a node of its own. Of another tensor that is gone only the node
// remains, which may have other outputs.
bool KeptGradients::Variable::has_hooks() const {
  const auto alive = given.lock();
  return history.has_hooks || !(alive ? torch::autograd::impl::hooks(at::Tensor(alive))
                                      : edge.function->tensor_pre_hooks())
                                   .empty();
}

void KeptGradients::check(const edge_list& roots, const edge_list& targets) const {
  if (variables_.empty()) return;
  // Nodes below the only target do not matter.
  const Reached all(roots, [&targets](const GradientPlace& place) {
    return targets.size() != 1 || place != GradientPlace::of(targets.front());
  });
  for (const Variable& variable : variables_) {
    const bool is_reached = all.contain(variable.edge);
    const bool is_target = targets.empty() ? is_reached && is_leaf(*variable.edge.function)
                                           : contains(targets, variable.edge);
    const KeptHistory& history = variable.history;
    // A shared value may be the same tensor as any other that the gradient reaches.
    const bool has_hooks_anywhere = history.is_shared && variable.has_hooks();
    if (!is_reached && !is_target && !has_hooks_anywhere) continue;
    bool is_used_beside = history.is_shared || (targets.empty() && history.is_argument);
    bool has_hooks = history.has_hooks || has_hooks_anywhere;
    for (const Variable& other : variables_) {
      const bool may_be_same = other.number == variable.number || other.history.is_shared;
      if (&other == &variable || !may_be_same) continue;
      is_used_beside |= all.contain(other.edge);
      has_hooks |= other.has_hooks();
    }
    if (is_target && is_used_beside)
      refuse(
          region_,
          "a gradient was taken, inside a recompute, of a kept value whose original is used, too");
    if (has_hooks)
      refuse(region_,
             "a gradient was taken, inside a recompute, from, of or through a kept value whose "
             "original has hooks");
    // Only a tensor that the region made from the value cannot be a source of the value.
    const Node& kept = *variable.edge.function;
    const auto is_younger = [&](const Edge& target) {
      return all.contain(target) && !is_leaf(*target.function) &&
             dynamic_cast<const KeptEdge*>(target.function.get()) == nullptr &&
             target.function->thread_id() == kept.thread_id() &&
             target.function->sequence_nr() > kept.sequence_nr();
    };
    for (const Edge& target : targets)
      if (history.is_open && target != variable.edge && !is_younger(target))
        refuse(region_, "a gradient was taken, inside a recompute, past a kept value");
  }
}

}  // namespace remat
