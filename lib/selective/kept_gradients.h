#pragma once
// The autograd role of a value that a recompute did not compute, and the checks of backwards inside
// the recompute.

#include <torch/csrc/autograd/function.h>

#include <vector>

#include "lib/frame/region.h"
#include "lib/tensor/graph_walk.h"

namespace remat {

// Note [Gradients that meet a kept value]
// pin, checkpoint_name and save_region keep a value, not its computation. In forward the value has
// its whole history, so a backward inside the region may go through it or end at it. A recompute
// repeats that backward on a graph that is cut at the value, and throws where the value may matter:
//   the backward asks for the value's own gradient;
//   the backward reaches the value, and asks for a gradient of a tensor that may be older;
//   the value has hooks, in forward or in the recompute.
// A value's data show none of these cases; an undetected one would give a wrong gradient. The check
// does not decide whether the gradients really differ: the cure is the same.

/// The kept values that one recompute has returned to its function.
class KeptGradients {
 public:
  explicit KeptGradients(const Region& region) : region_(region) {}
  /// Returns an alias of `data` with the role of the original. `had_hooks`: the original had hooks
  /// when it was kept. `sources`: edges of tensors from which it may come.
  at::Tensor give(const at::Tensor& data, GradRole role, bool had_hooks,
                  const torch::autograd::edge_list& sources);
  /// Checks a backward that begins in the recompute. Throws CheckpointError if its gradients could
  /// differ.
  void check(const torch::autograd::edge_list& roots,
             const torch::autograd::edge_list& targets) const;
  /// Forgets the values when the function has ended, so that its graph may die.
  void clear() { values_.clear(); }

 private:
  struct Value {
    torch::autograd::Edge edge;
    bool had_hooks;
  };
  const Region& region_;
  std::vector<Value> values_;
};

}  // namespace remat
