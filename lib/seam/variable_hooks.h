#pragma once
// Sees what functions register on tensors, and says where gradients of leaves go in recomputes.
//
// Note [Seeing registrations]
// `Tensor::register_hook`, `requires_grad_` and `grad_fn` reach LibTorch through one table of
// functions, VariableHooksInterface. We put a table in front of it that forwards everything, as our
// engine does (Note [The forwarding engine]). What goes past the table (`set_requires_grad`, hooks put
// on nodes by hand) cannot be seen as it happens: Note [Tensors from outside].

#include <ATen/core/TensorBase.h>
#include <torch/csrc/autograd/edge.h>

#include <atomic>
#include <cstdint>
#include <optional>

namespace remat::seam {

using NodePtr = decltype(torch::autograd::Edge::function);

/// The thread that registers calls them; plain functions, set once.
struct RegistrationCallbacks {
  /// A hook is about to be registered on a tensor. The handle of one that stands for it, with which
  /// nothing is registered; or none.
  std::optional<unsigned> (*hook_begins)(const at::TensorBase& tensor);
  /// The hook has been registered, and has this handle.
  void (*hook_registered)(const at::TensorBase& tensor, unsigned handle);
  /// `requires_grad_` is about to be called.
  void (*requires_grad_changes)(const at::TensorBase& tensor);
  /// A node that is said to be a tensor's `grad_fn` on this thread; null: what LibTorch says. Asked only
  /// while any NodesInstead is alive.
  const NodePtr* (*node_instead)(const at::TensorBase& tensor);
};

/// While one is alive, somewhere in the process nodes stand for those of tensors.
class NodesInstead {
 public:
  NodesInstead() { num_alive_.fetch_add(1, std::memory_order_relaxed); }
  ~NodesInstead() { num_alive_.fetch_sub(1, std::memory_order_relaxed); }
  NodesInstead& operator=(NodesInstead&&) = delete;
  static bool any() { return num_alive_.load(std::memory_order_relaxed) > 0; }

 private:
  static inline std::atomic<int64_t> num_alive_{0};
};

/// Puts our table in front. Call it once.
void install(const RegistrationCallbacks& callbacks);

/// Whether the hook with that handle is still on the tensor.
bool has_hook(const at::TensorBase& tensor, unsigned handle);

}  // namespace remat::seam
