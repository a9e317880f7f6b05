#pragma once
// Notifies of the collectives that this process runs.
//
// Note [Seeing collectives]
// Every collective of torch.distributed ends in an operator of the library `c10d`, the functional
// ones too. These operators have no kernel at the key ADInplaceOrView, which every tensor outside
// of inference mode has. A kernel of ours stands there: it notifies, and the operator goes on.
// Other operators pay nothing.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace remat::seam {

/// Called before a collective that may write to its first argument, on its thread.
using CollectiveWatcher = void (*)(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
/// Sets the watcher. Call it once, when the library is loaded.
void watch_collectives(CollectiveWatcher watcher);

using WorkMaker = c10::IValue (*)();
/// Makes the Work of a collective that has ended; null where LibTorch has no collectives.
inline constinit WorkMaker ended_work = nullptr;

}  // namespace remat::seam
