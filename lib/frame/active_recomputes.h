#pragma once
// The recomputes that a thread is running, and the backwards that begin in them.

#include <torch/csrc/autograd/function.h>

#include "lib/base/recompute_lock.h"
#include "lib/frame/filler.h"
#include "lib/frame/values_by_task.h"

namespace remat {

/// While a recompute is prepared on this thread: what the user's hooks, observers and providers
/// differentiate is no backward of a region that waits here.
class PreparingRecompute {
 public:
  PreparingRecompute();
  ~PreparingRecompute();
  PreparingRecompute& operator=(PreparingRecompute&&) = delete;

 private:
  const bool before_;
};

/// While alive, the function of a recompute runs on this thread. The recompute is prepared.
class ActiveRecompute {
 public:
  ActiveRecompute(ValuesByTask& all, RecomputedValues& values, Filler& filler,
                  const LockOwner& owner);
  ~ActiveRecompute();
  ActiveRecompute& operator=(ActiveRecompute&&) = delete;
};

/// A backward begins on this thread: recomputes that this thread runs cannot go on before it ends,
/// so nobody may wait for them any more (a waiting thread could be the one that backward needs).
/// Throws CheckpointError if a recompute cannot repeat it (Note [Backwards inside a region]), or if
/// it asks a kept value for what no recompute knows.
void backward_begins(const torch::autograd::edge_list& roots,
                     const torch::autograd::edge_list& targets, bool accumulates);

/// The backward has ended; `gradients`: what it returns, none if it threw; `given`: those of its
/// roots. Throws nothing.
void backward_ended(const torch::autograd::variable_list& gradients,
                    const torch::autograd::variable_list& given);
/// After that, if it returned. Throws what the recompute's stop throws, where it ends.
void backward_returned();

}  // namespace remat
