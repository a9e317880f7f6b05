#pragma once
// Hooks of another language in a recompute: they get each result without its history.

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>
#include <utility>

#include "hooks/pack/inspection.h"
#include "lib/seam/autograd_meta.h"
#include "lib/seam/engine.h"
#include "lib/seam/own_hooks.h"
#include "lib/seam/plain_tensor.h"

namespace remat {

/// Note [Hooks that keep the tensor]
/// A Python pack function may return its argument. If an operator saves its result, that makes a
/// cycle: node, hook, tensor, node. Plain autograd breaks the cycle when backward frees the node,
/// but no backward runs through a recompute's graph. There the function therefore gets an alias of
/// the result, with an end node of its own as `grad_fn`. LibTorch restores the history itself when
/// it unpacks.
class InRecompute final : public seam::OwnHooks {
 public:
  explicit InRecompute(std::unique_ptr<torch::autograd::SavedVariableHooks> hooks)
      : hooks_(std::move(hooks)) {}
  void call_pack_hook(const at::Tensor& saved) override {
    if (seam::node_of(saved) == nullptr) return hooks_->call_pack_hook(saved);
    at::Tensor alias = seam::alias_without_history(saved);
    torch::autograd::create_gradient_edge(alias,
                                          seam::make_node<seam::EndNode>("remat::RecomputedEdge"));
    hooks_->call_pack_hook(alias);
  }
  at::Tensor call_unpack_hook() override { return hooks_->call_unpack_hook(); }

 private:
  void refuse_tracing() const override {
    TORCH_CHECK(Inspection::current() != nullptr,
                "remat::checkpoint: compiled autograd cannot trace the graph of a recompute. "
                "Hint: run a backward inside of a region without compiled autograd.");
  }
  const std::unique_ptr<torch::autograd::SavedVariableHooks> hooks_;
};

}  // namespace remat
