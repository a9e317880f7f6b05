#pragma once
// Hooks over several tensors that a recompute registers, and that would keep its graph for ever.

#include <utility>
#include <vector>

#include "python.h"

namespace remat::python {

// Note [Hooks over several tensors]
// A hook that `register_multi_grad_hook` puts on a node holds the nodes of all its tensors, itself
// among them: a cycle that Python's collector does not see. Plain autograd leaves the nodes behind,
// without their saved tensors, which backward has freed. A recompute's graph runs no backward, so
// that all saved tensors of its nodes would stay, in each step. So at the end of a recompute the
// hooks that were registered in it release their nodes. Nodes that live on have other owners, such
// as a variable outside into which the function has put its graph, and the hooks get them back. No
// backward can reach a node that is gone.

/// Notes, while alive, the hooks that `register_multi_grad_hook` registers on this thread. The
/// interpreter's lock is held.
class HookCycles {
 public:
  HookCycles();
  /// Releases the nodes without other owners. The function's frames are gone by then.
  ~HookCycles();
  HookCycles(const HookCycles&) = delete;
  HookCycles& operator=(const HookCycles&) = delete;

  /// The handles of one call, a tuple.
  void note(py::object handles) { handles_.push_back(std::move(handles)); }

 private:
  HookCycles* const around_;
  std::vector<py::object> handles_;
};

}  // namespace remat::python
