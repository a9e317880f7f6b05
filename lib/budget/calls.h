#pragma once
// The recording of operators in the scope of a budget.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace remat::budget {

/// Runs an operator of this thread, and records it if it can run again. Called by the dispatch
/// mode.
void run_operator(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace remat::budget
