#pragma once
// The autograd role of a value that a recompute did not compute, and what backwards in it may ask of it.

#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <vector>

#include "lib/frame/region.h"
#include "lib/seam/engine.h"
#include "lib/tensor/capture.h"
#include "lib/tensor/graph_walk.h"

namespace remat {

// Note [Gradients that meet a kept value]
// pin, checkpoint_name and save_region keep a value, not how it was computed. In forward it has its
// whole history, so a backward inside the region may go through it, or end at it. A recompute runs that
// backward again, on a graph that is cut there, and where the two could differ it throws:
//   through the value   its node leads to what the value may come from, and throws when it is run
//   to the value        if the tensor that it was in forward is in use beside it, or has hooks: pin
//                       returns its argument, and gradients of that count all its uses
//   past the value      to something older than it, if save_region's function used, beside its
//                       arguments, tensors that no recompute can find again
// None of them can be seen in a value's data; a wrong slope would end as a wrong gradient.

/// Forward notes this of one kept value.
struct KeptHistory {
  enum class Twin { None, Argument, Unknown };
  enum class Sources { Known, OlderThanRegion, Any };
  Twin twin = Twin::None;  ///< another variable that holds the same tensor
  int32_t same_as = -1;    ///< the argument
  Sources sources = Sources::Known;
  bool has_hooks = false;  ///< registered on it before it was kept
  WeakTensor leaf{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};  ///< itself
};

/// What a pin was given, by identity: compared only, and only with what is alive.
struct PinArguments {
  struct Argument {
    const c10::TensorImpl* impl;
    const torch::autograd::Node* node;
    uint32_t output;
  };
  std::vector<Argument> all;
  void add(const at::Tensor& tensor);
};

/// `num_owners`: of variables that hold `value` if nothing but the result does. The leaves that its
/// gradients lead to are appended.
KeptHistory history_of(const at::Tensor& value, std::size_t num_owners,
                       const PinArguments& arguments, const RegionStart& pin,
                       const RegionStart& region, std::vector<at::Tensor>& leaves);

/// The kept values that one recompute has handed out.
class KeptGradients {
 public:
  explicit KeptGradients(const Region& region) : region_(region) {}
  /// Gives out an alias of `data` with the role of the original. `read`: what its pin would read
  /// now; `more_sources`: what else it may come from.
  at::Tensor give(const at::Tensor& data, GradRole role, const KeptHistory& history,
                  const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& more_sources);
  /// A backward begins in the recompute. Throws CheckpointError if its gradients would differ.
  void check(const torch::autograd::edge_list& roots,
             const torch::autograd::edge_list& targets) const;
  /// The function has ended: its graph may die.
  void clear();

 private:
  struct Role {
    /// `original`: of the tensor that it is another variable of; that may have been kept in its turn.
    torch::autograd::Edge edge, original;
    WeakTensor original_tensor{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
    KeptHistory history;
  };
  bool may_be_original_leaf(const Role& role, const torch::autograd::Edge& target) const;
  bool has_hooks_elsewhere(const Role& role) const;
  bool is_used_elsewhere(const Role& role, const torch::autograd::edge_list& roots) const;
  bool may_be_source(const Role& role, const torch::autograd::Edge& target) const;

  const Region& region_;
  const RegionStart start_ = RegionStart::here();
  std::vector<Role> roles_;
  std::vector<torch::autograd::Edge> sources_;
};

}  // namespace remat
