#pragma once
// The operators of a thread with a budget: recorded where they can run again.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace remat::budget {

/// Handles an operator of this thread; what our dispatch mode calls.
void run_operator(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace remat::budget
