#pragma once
// The operators of a thread with a budget: recorded where they can run again.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "lib/budget/graph.h"
#include "lib/selective/call_record.h"

namespace remat::budget {

/// Handles an operator of this thread; what our dispatch mode calls.
void run_operator(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// Whether the tensor is geometry over memory of the CPU, and nothing else.
bool is_plain(const at::Tensor& tensor);

/// The storages that a call's results bring, each once and none of those given: in the same order in a
/// rerun.
using NewStorages = c10::SmallVector<c10::Storage, 2>;
NewStorages new_storages(c10::ArrayRef<c10::IValue> results, const StoragesOf& given);

/// What wrote to a value in place has let its version counter go on: takes note of it.
void settle_versions();

}  // namespace remat::budget
