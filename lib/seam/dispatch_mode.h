#pragma once
// Sees the operators of a thread through a dispatch mode of ours, which can be suspended.
//
// Note [Seeing operators]
// Our TorchDispatchMode has an interpreter of our own. LibTorch hands it every operator that is not
// composed of others, boxed, below autograd. The mode is off while it handles one, as LibTorch
// requires. The modes of a Python process are on the same stack.
//
// Note [Looking away]
// LibTorch turns a mode off by removing it from that stack, and turning it on again was a fifth of
// the cost of seeing an operator. A process without Python has no other modes and no tensors of a
// Python class. There our mode stays on the stack, and the dispatch keys that lead to modes are
// excluded instead. A region that opens meanwhile, in a custom operator's kernel for example,
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
/// Sets the handler. Call it once, before operators are seen.
void set_operator_handler(OperatorHandler handler);

/// Passes the operators of this thread to the handler while alive, also on the threads that run a
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
/// Returns whether our mode handles operators that LibTorch hands to a mode now.
bool is_our_mode_on_top();

/// Suspends the dispatch mode for its lifetime.
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
// without a mode runs with fewer keys excluded: those that the caller excluded, and those that
// kernels on the way exclude. The latter are autograd's (always), ADInplaceOrView (except for some
// operators that write) and autocast's (if the operator has a kernel there). A kernel may depend on
// the other keys: it conjugates lazily (pinv), increments the version of tensors that it writes
// (_foreach_add_), or calls operators that autocast (bilinear).

/// Returns the keys that kernels on the way to the operator's own exclude. Not cheap.
c10::DispatchKeySet keys_met(const c10::OperatorHandle& op);

/// In the handler, lets a kernel run as without a mode, for its lifetime: operators do not reach
/// the handler, and dispatch keys are those that the kernel would find. `met`: keys_met() of the
/// operator.
class AtKernel {
 public:
  explicit AtKernel(c10::DispatchKeySet met);
  ~AtKernel();
  AtKernel& operator=(AtKernel&&) = delete;

 private:
  const c10::impl::LocalDispatchKeySet before_;
  std::shared_ptr<c10::impl::PyObject_TorchDispatchMode> mode_;  // ours, if it had to be removed
};

/// Handles an operator that LibTorch hands to our mode.
void handle_operator(const c10::OperatorHandle& op, torch::jit::Stack& stack);
/// Returns whether the handler, or a function called by it, runs on this thread.
bool is_handling_operator();

}  // namespace remat::seam
