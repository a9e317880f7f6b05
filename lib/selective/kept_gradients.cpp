#include "lib/selective/kept_gradients.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
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
using torch::autograd::Node;

constexpr char cause[] = "pin and save_region keep a value, not how it was computed";
constexpr char advice[] =
    "compute what is differentiated inside the region again: leave pin or save_region away for it";

[[noreturn]] void refuse(const Region& region, const char* fact) {
  throw_unsupported(region, fact, cause, advice);
}

/// A recompute must not be differentiated through a value that it did not compute.
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

bool is_older(const Node& node, const RegionStart& start) {
  return node.sequence_nr() < start.sequence || node.thread_id() != start.thread;
}

}  // namespace

void PinArguments::add(const at::Tensor& tensor) {
  if (!tensor.defined() || !has_gradient_edge(tensor)) return;
  const Edge edge = torch::autograd::impl::gradient_edge(tensor);
  all.push_back({tensor.unsafeGetTensorImpl(), edge.function.get(), edge.input_nr});
}

KeptHistory history_of(const at::Tensor& value, std::size_t num_owners,
                       const PinArguments& arguments, const RegionStart& pin,
                       const RegionStart& region, std::vector<at::Tensor>& leaves) {
  KeptHistory history;
  if (!value.defined() || !has_gradient_edge(value)) return history;
  history.has_hooks = !torch::autograd::impl::hooks(value).empty();
  if (value.is_leaf()) history.leaf = WeakTensor(value.getIntrusivePtr());
  if (value.use_count() > num_owners) {
    const auto same =
        std::find_if(arguments.all.begin(), arguments.all.end(),
                     [&](const auto& each) { return each.impl == value.unsafeGetTensorImpl(); });
    const bool is_argument = same != arguments.all.end();
    history.twin = is_argument ? KeptHistory::Twin::Argument : KeptHistory::Twin::Unknown;
    if (is_argument) history.same_as = static_cast<int32_t>(same - arguments.all.begin());
  }
  if (value.grad_fn() == nullptr) return history;
  std::vector<Edge> waiting{torch::autograd::impl::gradient_edge(value)};
  std::unordered_set<const Node*> seen{waiting.back().function.get()};
  while (!waiting.empty()) {
    const Edge edge = std::move(waiting.back());
    waiting.pop_back();
    const bool is_argument =
        std::any_of(arguments.all.begin(), arguments.all.end(), [&](const auto& each) {
          return each.node == edge.function.get() && each.output == edge.input_nr;
        });
    if (auto* const leaf = dynamic_cast<AccumulateGrad*>(edge.function.get())) {
      leaves.push_back(leaf->variable);
    } else if (!is_older(*edge.function, pin)) {
      for (const Edge& next : edge.function->next_edges())
        if (next.is_valid() && seen.insert(next.function.get()).second) waiting.push_back(next);
    } else if (!is_argument) {
      history.sources = std::max(history.sources, is_older(*edge.function, region)
                                                      ? KeptHistory::Sources::OlderThanRegion
                                                      : KeptHistory::Sources::Any);
    }
  }
  return history;
}

at::Tensor KeptGradients::give(const at::Tensor& data, GradRole role, const KeptHistory& history,
                               const std::vector<at::Tensor>& read,
                               const std::vector<at::Tensor>& more_sources) {
  at::Tensor kept = data.tensor_data();
  if (role == GradRole::None) return kept;
  if (role != GradRole::Result) {
    kept.set_requires_grad(true);
    if (role == GradRole::NoGradViewOfLeaf) return without_gradient_edge(kept);
  } else {
    torch::autograd::edge_list edges;
    for (const auto* const sources : {&read, &more_sources})
      for (const at::Tensor& each : *sources)
        if (each.defined() && has_gradient_edge(each))
          edges.push_back(torch::autograd::impl::gradient_edge(each));
    sources_.insert(sources_.end(), edges.begin(), edges.end());
    auto node = seam::make_node<KeptEdge>();
    node->set_next_edges(std::move(edges));
    torch::autograd::create_gradient_edge(kept, std::move(node));
  }
  Role given{
      .edge = torch::autograd::impl::gradient_edge(kept), .original = {}, .history = history};
  if (history.twin == KeptHistory::Twin::Argument) {
    // Forward's numbers leave out arguments that need no gradient, as these do.
    int32_t number = -1;
    for (const at::Tensor& each : read)
      if (each.defined() && has_gradient_edge(each) && ++number == history.same_as)
        given.original = torch::autograd::impl::gradient_edge(each),
        given.original_tensor = WeakTensor(each.getIntrusivePtr());
    for (const Role& other : roles_)
      if (other.edge == given.original && other.original.is_valid())
        given.original = other.original, given.original_tensor = other.original_tensor;
    if (!given.original.is_valid()) given.history.twin = KeptHistory::Twin::Unknown;
  }
  roles_.push_back(std::move(given));
  return kept;
}

void KeptGradients::clear() {
  roles_.clear();
  sources_.clear();
}

void KeptGradients::check(const torch::autograd::edge_list& roots,
                          const torch::autograd::edge_list& targets) const {
  if (roles_.empty()) return;
  if (targets.empty()) {
    // A backward that goes all the way down meets the nodes themselves, or adds to what is no leaf but
    // in the recompute.
    std::optional<Reached> all;
    for (const Role& role : roles_) {
      if (!is_leaf(*role.edge.function)) continue;
      if (role.history.twin == KeptHistory::Twin::None && !role.history.has_hooks) continue;
      if (!all) all.emplace(roots);
      if (all->contain(role.edge))
        refuse(
            region_,
            "a backward inside a recompute added to the gradient of a kept value, of which the original, "
            "with its hooks, would have got it");
    }
    return;
  }
  // Below a kept value the walk goes on with what it may come from.
  const Reached all(roots);
  for (const Role& role : roles_) {
    // The engine runs the hooks of a root also where the way from it leads to no target.
    if (std::find(roots.begin(), roots.end(), role.edge) != roots.end() &&
        has_hooks_elsewhere(role))
      refuse(
          region_,
          "a gradient was taken, inside a recompute, from a kept value whose original has hooks");
    for (const Edge& target : targets) {
      if (target == role.edge) {
        if (is_used_elsewhere(role, roots))
          refuse(
              region_,
              "a gradient was taken, inside a recompute, of a kept value whose original is used, too");
        if (has_hooks_elsewhere(role))
          refuse(
              region_,
              "a gradient was taken, inside a recompute, of a kept value whose original has hooks");
      } else if (may_be_original_leaf(role, target) && all.contain(role.edge)) {
        refuse(
            region_,
            "a gradient was taken, inside a recompute, of a leaf of which a kept value was used");
      } else if (role.history.sources != KeptHistory::Sources::Known && all.contain(role.edge) &&
                 may_be_source(role, target)) {
        refuse(region_, "a gradient was taken, inside a recompute, past a kept value");
      }
    }
  }
}

bool KeptGradients::may_be_original_leaf(const Role& role, const Edge& target) const {
  if (!is_leaf(*role.edge.function) || !is_leaf(*target.function)) return false;
  if (role.history.twin == KeptHistory::Twin::Argument) return target == role.original;
  const auto& wanted = static_cast<const AccumulateGrad&>(*target.function).variable;
  const auto& kept = static_cast<const AccumulateGrad&>(*role.edge.function).variable;
  return role.history.twin == KeptHistory::Twin::Unknown &&
         (storage_of(wanted) == storage_of(kept) ||
          wanted.unsafeGetTensorImpl() == role.history.leaf._unsafe_get_target());
}

bool KeptGradients::has_hooks_elsewhere(const Role& role) const {
  if (role.history.has_hooks) return true;
  if (!role.original.is_valid()) return false;
  const auto original = role.original_tensor.lock();
  // Of one that is gone only the node is left, which may have other outputs.
  if (original ? !torch::autograd::impl::hooks(at::Tensor(original)).empty()
               : !role.original.function->tensor_pre_hooks().empty())
    return true;
  return std::any_of(roles_.begin(), roles_.end(), [&](const Role& other) {
    return &other != &role && other.original == role.original &&
           !other.edge.function->tensor_pre_hooks().empty();
  });
}

bool KeptGradients::is_used_elsewhere(const Role& role,
                                      const torch::autograd::edge_list& roots) const {
  if (role.history.twin == KeptHistory::Twin::None) return false;
  if (role.history.twin == KeptHistory::Twin::Unknown) return true;
  const Reached others(
      roots, [&role](const GradientPlace& place) { return place != GradientPlace::of(role.edge); });
  return others.contain(role.original) ||
         std::any_of(roles_.begin(), roles_.end(), [&](const Role& other) {
           return &other != &role && other.original == role.original && others.contain(other.edge);
         });
}

bool KeptGradients::may_be_source(const Role& role, const Edge& target) const {
  // What it is known to come from throws when it is met.
  if (std::find(sources_.begin(), sources_.end(), target) != sources_.end()) return false;
  const Node& node = *target.function;
  if (is_leaf(node)) return true;
  if (std::any_of(roles_.begin(), roles_.end(),
                  [&node](const Role& each) { return each.edge.function.get() == &node; }))
    return true;
  if (role.history.sources == KeptHistory::Sources::OlderThanRegion) return is_older(node, start_);
  return node.thread_id() != start_.thread ||
         node.sequence_nr() < role.edge.function->sequence_nr();
}

}  // namespace remat
