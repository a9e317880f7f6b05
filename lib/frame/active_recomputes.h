#pragma once
// Tracks the recomputes that a thread is running, and the backwards that begin in them.

#include <torch/csrc/autograd/function.h>

#include "lib/base/recompute_lock.h"
#include "lib/frame/filler.h"
#include "lib/frame/values_by_task.h"

namespace remat {

/// Returns this thread's mark of preparing a recompute. A backward run meanwhile by the user's
/// hooks, observers or providers is not reported to the regions that wait on this thread.
bool& is_preparing_recompute();

/// Marks this thread as running the function of a recompute, which is prepared by then.
class ActiveRecompute {
 public:
  ActiveRecompute(ValuesByTask& all, RecomputedValues& values, Filler& filler,
                  const LockOwner& owner);
  ~ActiveRecompute();
  ActiveRecompute& operator=(ActiveRecompute&&) = delete;
};

/// Reports that a backward begins on this thread. Recomputes that this thread runs cannot continue
/// before it ends, so other threads stop waiting for them: the backward may need a waiting thread.
/// Throws CheckpointError if a recompute cannot repeat the backward
/// (Note [Backwards inside a region]), or if the backward asks for the gradient of a kept value
/// that no recompute can compute.
void backward_begins(const torch::autograd::edge_list& roots,
                     const torch::autograd::edge_list& targets, bool accumulates);

/// Reports that the backward has ended. `gradients`: the gradients that it returns, empty if it
/// threw; `given`: the gradients of its roots. Throws nothing.
void backward_ended(const torch::autograd::variable_list& gradients,
                    const torch::autograd::variable_list& given);
/// Called after backward_ended(), if the backward returned. Throws the recompute's stop signal if
/// the recompute ends here.
void backward_returned();

}  // namespace remat
