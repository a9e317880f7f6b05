#pragma once
// The dispatch of an operator: the innermost region decides about it, and enclosing regions record
// it.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace remat {

/// Handles an operator of this thread; called by the library's dispatch mode.
void run_operator(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace remat
