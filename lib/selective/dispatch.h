#pragma once
// Who handles an operator: the innermost region decides about it, those around take note.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace remat {

/// Handles an operator of this thread; what our dispatch mode calls.
void run_operator(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace remat
