#pragma once
// Hooks over several tensors that a recompute registers, and that would keep its graph for ever.

#include <utility>
#include <vector>

#include "python.h"

namespace remat::python {

// Note [Hooks over several tensors]
// A hook that `register_multi_grad_hook` puts on a node holds the nodes of all its tensors, itself
// among them: a cycle that Python's collector does not see. Plain autograd leaves the nodes behind,
// without what they saved, which backward has freed. Nobody runs a backward over a recompute's
// graph, so that all that its nodes have saved would stay, in each step. So at the end of a
// recompute the hooks that were registered in it let go of their nodes. Those that live on have
// other owners, as where the function has put its graph into a variable outside, and the hooks get
// them back; of a node that is gone no backward could have come.

/// While alive, on this thread: notes what `register_multi_grad_hook` registers. The interpreter's
/// lock is held.
class HookCycles {
 public:
  HookCycles();
  /// Lets go of what nothing else has. The function's frames are gone by then.
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
