#pragma once
// The autograd role of a value that a recompute did not compute, and the checks of backwards inside
// the recompute.

#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <vector>

#include "lib/frame/region.h"
#include "lib/seam/engine.h"
#include "lib/tensor/capture.h"
#include "lib/tensor/graph_walk.h"

namespace remat {

// Note [Gradients that meet a kept value]
// pin, checkpoint_name and save_region keep a value, not its computation. In forward the value has
// its whole history, so a backward inside the region may go through it or end at it. A recompute
// repeats that backward on a graph that is cut at the value. Where the gradients could differ, it
// throws:
//   through the value   the value's node leads to its possible sources, and throws when it runs
//   to the value        if forward's tensor is used besides the value: pin returns its argument,
//                       whose gradients count all its uses
//   at hooks            on forward's tensor, which the value does not have, or on the value itself
//   past the value      to a tensor that may be older, if save_region's function used tensors that
//                       no recompute can find again, besides its arguments and the region's
// A value's data show none of these cases; an undetected one would give a wrong gradient. The check
// does not decide whether the gradients really differ: it refuses some correct cases too, for which
// the cure is the same.

/// The history of one kept value, recorded in forward.
struct KeptHistory {
  bool is_argument = false;  ///< it is the argument of pin or checkpoint_name
  bool is_shared = false;  ///< save_region's function returned a tensor that has other owners, too
  bool is_open = false;    ///< it is, or comes from, a tensor that no recompute can find again
  bool has_hooks = false;  ///< the value had hooks before it was kept
};

/// Returns the history of a result of save_region. `num_owners`: number of variables that hold
/// `value` if only the result owns it. `known`: where gradients of the arguments go. Appends to
/// `leaves` the leaves to which its gradients lead.
KeptHistory history_of(const at::Tensor& value, std::size_t num_owners,
                       const std::vector<GradientPlace>& known, const RegionStart& start,
                       std::vector<WeakTensor>& leaves);

/// The kept values that one recompute has returned to its function.
class KeptGradients {
 public:
  explicit KeptGradients(const Region& region) : region_(region) {}
  /// Returns an alias of `data` with the role of the original. `read`: the present arguments of its
  /// pin; `more_sources`: other tensors from which it may come.
  at::Tensor give(const at::Tensor& data, GradRole role, KeptHistory history,
                  const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& more_sources);
  /// Checks a backward that begins in the recompute. Throws CheckpointError if its gradients could
  /// differ.
  void check(const torch::autograd::edge_list& roots,
             const torch::autograd::edge_list& targets) const;
  /// Forgets the values when the function has ended, so that its graph may die.
  void clear() { variables_.clear(); }

 private:
  /// A kept value, or the argument of a pin.
  struct Variable {
    torch::autograd::Edge edge;
    std::size_t number;  ///< equal for values that were one tensor in forward
    KeptHistory history{};
    WeakTensor given{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
    bool has_hooks() const;
  };
  const Variable& original_of(const at::Tensor& given);

  const Region& region_;
  std::vector<Variable> variables_;
};

}  // namespace remat
