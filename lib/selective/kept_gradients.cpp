#include "lib/selective/kept_gradients.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "lib/base/error.h"
#include "lib/frame/frame_scope.h"
#include "lib/frame/mismatch.h"
#include "lib/seam/engine.h"
#include "lib/selective/operator_handler.h"

namespace remat {

namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;

constexpr char fact[] = "a gradient was taken inside a recompute, and a kept value may change it";
constexpr char cause[] = "pin and save_region keep a value without its history";
constexpr char advice[] =
    "do not use pin or save_region for values that are differentiated inside the region";

/// The node of a kept value. It throws, since a recompute must not be differentiated through a
/// value that it did not compute.
struct KeptEdge final : Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    detail::visit_regions([&](detail::RegionScope& scope) {
      if (!scope.is_recompute || scope.is_save_region) return;
      try {
        throw_unsupported(static_cast<FrameScope&>(scope).frame().region(), fact, cause, advice);
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

at::Tensor KeptGradients::give(const at::Tensor& data, GradRole role, bool had_hooks,
                               const edge_list& sources) {
  at::Tensor kept = data.tensor_data();
  if (role == GradRole::None) return kept;
  if (role == GradRole::NoGradViewOfLeaf)
    return without_gradient_edge(kept.set_requires_grad(true));
  if (role == GradRole::Leaf) {
    kept.set_requires_grad(true);
  } else {
    auto node = seam::make_node<KeptEdge>();
    node->set_next_edges(edge_list(sources));
    torch::autograd::create_gradient_edge(kept, std::move(node));
  }
  values_.push_back({torch::autograd::impl::gradient_edge(kept), had_hooks});
  return kept;
}

void KeptGradients::check(const edge_list& roots, const edge_list& targets) const {
  if (values_.empty()) return;
  const Reached all(roots);
  for (const Value& value : values_) {
    // A tensor that the region made on this thread after the value is no source of the value.
    Node& kept = *value.edge.function;
    const auto is_younger = [&kept](const Edge& target) {
      return !is_leaf(*target.function) && target.function->thread_id() == kept.thread_id() &&
             target.function->sequence_nr() > kept.sequence_nr();
    };
    const bool has_hooks = value.had_hooks || !kept.tensor_pre_hooks().empty();
    const bool is_target = std::find(targets.begin(), targets.end(), value.edge) != targets.end();
    const bool may_lead_to_target =
        all.contain(value.edge) &&
        (targets.empty() || !std::all_of(targets.begin(), targets.end(), is_younger));
    if (has_hooks || is_target || may_lead_to_target)
      throw_unsupported(region_, fact, cause, advice);
  }
}

}  // namespace remat
