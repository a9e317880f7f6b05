#pragma once
// Seeing the operators of a thread: a dispatch mode of ours, and when it looks away.
//
// Note [Seeing operators]
// A TorchDispatchMode of our own interpreter: LibTorch hands it every operator that is not made of
// others, boxed, below autograd. It is off while it handles one, as LibTorch wants it; the modes
// of a Python process stand beside it on the same stack.
//
// Note [Looking away]
// LibTorch turns a mode off by taking it off that stack, and turning it on again was a fifth of what
// seeing an operator costs. In a process without Python no other mode and no tensor of a Python class
// can be met. There our mode stays on the stack, and the dispatch keys that lead to modes are
// excluded instead. A region that opens meanwhile, in a custom operator's kernel, say, includes
// them again.

#include <ATen/core/stack.h>

#include <cstdint>

namespace c10 {
class OperatorHandle;
}

namespace remat::seam {

/// Runs an operator below autograd, or puts results on the stack itself.
using OperatorHandler = void (*)(const c10::OperatorHandle& op, torch::jit::Stack& stack);
/// Once, before operators are seen.
void set_operator_handler(OperatorHandler handler);

/// While alive, the operators of this thread come to the handler, also on the threads that run a
/// backward for it. Nests.
class OperatorSight {
 public:
  OperatorSight();
  ~OperatorSight();
  OperatorSight(const OperatorSight&) = delete;
  OperatorSight& operator=(const OperatorSight&) = delete;

 private:
  bool is_first_, was_away_;
};

bool are_operators_seen();

/// While alive, they do not.
class OperatorsUnseen {
 public:
  OperatorsUnseen();
  ~OperatorsUnseen();
  OperatorsUnseen(const OperatorsUnseen&) = delete;
  OperatorsUnseen& operator=(const OperatorsUnseen&) = delete;

 private:
  bool was_seen_;
  int64_t num_above_ = 0;  // modes of others
};

/// LibTorch hands our mode an operator.
void handle_operator(const c10::OperatorHandle& op, torch::jit::Stack& stack);
/// Whether the handler runs on this thread, and what it calls.
bool is_handling_operator();

}  // namespace remat::seam
