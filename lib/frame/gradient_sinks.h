#pragma once
// Ends the gradients of a recompute's own backwards, in place of leaves from outside.
//
// Note [Accumulating once]
// A function that runs `backward()` accumulates into captured leaves. Forward has done so; a
// recompute that runs it again must not (Rule 14). The leaves that forward's backwards reached are
// noted. While a recompute of that region runs, each of them gets a node of its own, a sink, which
// an operator finds when it asks where the leaf's gradient goes. Gradients that the recompute
// computes for the leaf end there, `torch::autograd::grad` with respect to the leaf works, and
// nothing is accumulated. A backward that reaches such a leaf through a graph from outside is an
// error. So is a backward that asks for the gradient of a leaf with hooks, which a sink does not
// run.

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
  /// Adds the leaves that a backward from `roots` reaches.
  void add_below(const torch::autograd::edge_list& roots);
  bool contains(const c10::TensorImpl* leaf) const;
  bool is_empty() const { return leaves_.empty(); }

 private:
  std::vector<WeakTensor> leaves_;
};

/// The sinks of one recompute, for all its threads.
class GradientSinks {
 public:
  explicit GradientSinks(AccumulatedLeaves leaves) : leaves_(std::move(leaves)) {}

  /// Returns the sink that replaces the leaf's own node; null if `tensor` is not a noted leaf.
  const seam::NodePtr* sink_of(const at::TensorBase& tensor);
  /// Returns why a backward of the recompute would not compute forward's gradients; null if it
  /// would.
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
