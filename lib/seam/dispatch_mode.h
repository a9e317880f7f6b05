#pragma once
// Seeing the operators of a thread: a dispatch mode of ours, and when it looks away.
//
// Note [Seeing operators]
// A TorchDispatchMode of our own interpreter: LibTorch hands it every operator that is not made of
// others, boxed, below autograd. It is off while it handles one, as LibTorch wants it; the modes
// of a Python process stand beside it on the same stack.
//
// Note [Looking away]
// LibTorch turns a mode off by taking it off that stack, and turning it on again was a fifth of
// what seeing an operator costs. In a process without Python no other mode and no tensor of a
// Python class can be met. There our mode stays on the stack, and the dispatch keys that lead to
// modes are excluded instead. A region that opens meanwhile, in a custom operator's kernel, say,
// includes them again.

#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <cstdint>
#include <memory>

namespace c10 {
class OperatorHandle;
}

namespace remat::seam {

/// Runs an operator below autograd (AtKernel), or puts results on the stack itself.
using OperatorHandler = void (*)(const c10::OperatorHandle& op, torch::jit::Stack& stack);
/// Once, before operators are seen.
void set_operator_handler(OperatorHandler handler);

/// While alive, the operators of this thread come to the handler, also on the threads that run a
/// backward for it. Nests.
class DispatchMode {
 public:
  DispatchMode();
  ~DispatchMode();
  DispatchMode& operator=(DispatchMode&&) = delete;

 private:
  bool is_first_, was_away_;
};

bool is_dispatch_mode_on();
/// Whether operators that LibTorch hands to a mode now are ours to handle.
bool is_our_mode_on_top();

/// While alive, they do not.
class DispatchModeOff {
 public:
  DispatchModeOff();
  ~DispatchModeOff();
  DispatchModeOff& operator=(DispatchModeOff&&) = delete;

 private:
  bool was_seen_;
  int64_t num_above_ = 0;  // modes of others
};

// Note [Keys of a kernel]
// On the way to a mode LibTorch excludes every dispatch key above it. A kernel that is reached
// without a mode has only those excluded that the caller had, and that kernels on the way exclude:
// autograd's always, ADInplaceOrView but for some that write, autocast's if the operator has a
// kernel there. It may depend on the others: it conjugates lazily (pinv), counts up the version of
// what it writes (_foreach_add_), or calls operators that autocast (bilinear).

/// Finds the keys that kernels on the way to the operator's own exclude. Not cheap.
c10::DispatchKeySet keys_met(const c10::OperatorHandle& op);

/// While alive, in the handler: operators do not come to it, and a kernel finds the keys that it
/// would find without a mode. `met`: keys_met() of its operator.
class AtKernel {
 public:
  explicit AtKernel(c10::DispatchKeySet met);
  ~AtKernel();
  AtKernel& operator=(AtKernel&&) = delete;

 private:
  const c10::impl::LocalDispatchKeySet before_;
  std::shared_ptr<c10::impl::PyObject_TorchDispatchMode> mode_;  // ours, if it had to be taken off
};

/// LibTorch hands our mode an operator.
void handle_operator(const c10::OperatorHandle& op, torch::jit::Stack& stack);
/// Whether the handler runs on this thread, and what it calls.
bool is_handling_operator();

}  // namespace remat::seam
