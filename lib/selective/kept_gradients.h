#pragma once
// The autograd role of a value that a recompute did not compute, and what backwards in it may ask
// of it.

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
// whole history, so a backward inside the region may go through it, or end at it. A recompute runs
// that backward again, on a graph that is cut there, and where the two could differ it throws:
//   through the value   its node leads to what the value may come from, and throws when it is run
//   to the value        if the tensor that it was in forward is in use beside it: pin returns its
//                       argument, and gradients of that count all its uses
//   where hooks are     on that tensor, which the value does not have, or on the value beside it
//   past the value      to what may be older than it, if save_region's function used, beside its
//                       arguments and the region's, tensors that no recompute can find again
// None of them can be seen in a value's data; a wrong slope would end as a wrong gradient. Whether
// the two do differ is not worked out: more is refused than would be wrong, and the cure is the
// same.

/// Forward notes this of one kept value.
struct KeptHistory {
  bool is_argument = false;  ///< of pin or checkpoint_name: the tensor that they were given
  bool is_shared = false;    ///< save_region's function returned a tensor that others hold, too
  bool is_open = false;      ///< it is, or comes from, a tensor that no recompute can find again
  bool has_hooks = false;    ///< registered on it before it was kept
};

/// The history of what save_region returned. `num_owners`: of variables that hold `value` if
/// nothing but the result does. `known`: where gradients of the arguments go. The leaves that its
/// gradients lead to are appended.
KeptHistory history_of(const at::Tensor& value, std::size_t num_owners,
                       const std::vector<GradientPlace>& known, const RegionStart& start,
                       std::vector<WeakTensor>& leaves);

/// The kept values that one recompute has handed out.
class KeptGradients {
 public:
  explicit KeptGradients(const Region& region) : region_(region) {}
  /// Gives out an alias of `data` with the role of the original. `read`: what its pin would read
  /// now; `more_sources`: what else it may come from.
  at::Tensor give(const at::Tensor& data, GradRole role, KeptHistory history,
                  const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& more_sources);
  /// A backward begins in the recompute. Throws CheckpointError if its gradients could differ.
  void check(const torch::autograd::edge_list& roots,
             const torch::autograd::edge_list& targets) const;
  /// The function has ended: its graph may die.
  void clear() { variables_.clear(); }

 private:
  /// A kept value, or what a pin was given.
  struct Variable {
    torch::autograd::Edge edge;
    std::size_t number;  ///< those that were one tensor in forward have one number
    KeptHistory history{};
    WeakTensor given{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
    bool has_hooks() const;
  };
  const Variable& original_of(const at::Tensor& given);

  const Region& region_;
  std::vector<Variable> variables_;
};

}  // namespace remat
