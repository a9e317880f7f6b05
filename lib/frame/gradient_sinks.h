#pragma once
// Where the gradients of a recompute's own backwards go instead of into leaves from outside.
//
// Note [Accumulating once]
// A function that runs `backward()` accumulates into captured leaves. Forward has done so; a
// recompute that runs it again must not (Rule 14). The leaves that forward's backwards came to are
// noted. While a recompute of that region runs, each is told to have a node of its own, a sink,
// whenever an operator asks where its gradient goes: what the recompute computes of it ends there,
// `torch::autograd::grad` with respect to it works, and nothing is accumulated. A backward that
// comes to such a leaf all the same, through a graph from outside, is an error; so is one that asks
// for the gradient of a leaf that has hooks, which a sink does not run.

#include <ATen/core/TensorBase.h>
#include <torch/csrc/autograd/function.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "lib/seam/engine.h"
#include "lib/tensor/capture.h"

namespace remat {

/// The leaves that a region's function accumulated into in forward.
class AccumulatedLeaves {
 public:
  /// Adds the leaves that a backward from `roots` comes to.
  void add_below(const torch::autograd::edge_list& roots);
  bool contains(const c10::TensorImpl* leaf) const;
  bool is_empty() const { return leaves_.empty(); }

 private:
  std::vector<WeakTensor> leaves_;
};

/// One recompute has these sinks, for all its threads.
class GradientSinks {
 public:
  explicit GradientSinks(AccumulatedLeaves leaves) : leaves_(std::move(leaves)) {}

  /// The node that stands for a leaf's own; null if it is none of those.
  const seam::NodePtr* sink_of(const at::TensorBase& tensor);
  /// Says why a backward of the recompute would not give what forward's did; null if it would.
  const char* against(const torch::autograd::edge_list& roots,
                      const torch::autograd::edge_list& targets, bool accumulates);

 private:
  const seam::NodesInstead announced_;
  const AccumulatedLeaves leaves_;
  std::mutex mutex_;
  struct Sink {
    seam::NodePtr node;
    bool has_hooks;
  };
  std::map<const c10::TensorImpl*, Sink> sinks_;
};

}  // namespace remat
