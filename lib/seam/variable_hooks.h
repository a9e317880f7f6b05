#pragma once
// Sees hooks that functions register on tensors and nodes that they ask for, and redirects the
// gradients of leaves in recomputes.
//
// Note [Seeing registrations]
// `Tensor::register_hook`, `requires_grad_` and `grad_fn` reach LibTorch through one table of
// functions, VariableHooksInterface. We install a table in front of it that forwards everything,
// like our engine (Note [The forwarding engine]). Changes without the table (`set_requires_grad`,
// hooks put on nodes by hand) cannot be seen as they happen: Note [Tensors from outside].

#include <ATen/core/TensorBase.h>
#include <torch/csrc/autograd/edge.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace remat::seam {

using NodePtr = decltype(torch::autograd::Edge::function);

/// Called on the thread that registers; plain functions, set once.
struct RegistrationCallbacks {
  /// Called when a hook is about to be registered on a tensor. Returns the handle of an existing
  /// hook in its place, and then nothing is registered; or no value.
  std::optional<unsigned> (*hook_begins)(const at::TensorBase& tensor);
  /// Called when the hook has been registered with this handle.
  void (*hook_registered)(const at::TensorBase& tensor, unsigned handle);
  /// Called when `requires_grad_` is about to be called.
  void (*requires_grad_changes)(const at::TensorBase& tensor);
  /// Returns the node to report as a tensor's `grad_fn` on this thread; null for LibTorch's own.
  /// Called only while any NodesInstead is alive.
  const NodePtr* (*node_instead)(const at::TensorBase& tensor);
};

/// Marks, while alive, that nodes of tensors are replaced somewhere in the process.
class NodesInstead {
 public:
  NodesInstead() { num_alive_.fetch_add(1, std::memory_order_relaxed); }
  ~NodesInstead() { num_alive_.fetch_sub(1, std::memory_order_relaxed); }
  NodesInstead& operator=(NodesInstead&&) = delete;
  static bool any() { return num_alive_.load(std::memory_order_relaxed) > 0; }

 private:
  static inline std::atomic<int64_t> num_alive_{0};
};

/// Receives the tensors whose `grad_fn` is asked for on a thread. An operator asks for the nodes of
/// all tensors through which gradients may flow, after its own node was made and before its kernel
/// runs.
class NodeWatch {
 public:
  NodeWatch() = default;
  virtual ~NodeWatch() = default;
  NodeWatch& operator=(NodeWatch&&) = delete;
  /// Returns false once the watch is over; it then receives nothing, on whatever thread it ended.
  virtual bool is_watching() const = 0;
  /// Receives a tensor. `node`: the reported node; null for a leaf.
  virtual void node_asked(const at::TensorBase& tensor, const torch::autograd::Node* node) = 0;

 protected:
  /// Skips nodes that this thread has made from this sequence number on.
  void pass_over_from(uint64_t sequence, uint64_t thread) {
    passed_over_from_ = sequence;
    passed_over_thread_ = thread;
  }

 private:
  friend class NodeWatches;
  friend class OnlyNodeWatch;
  /// Remembers the tensor. Returns true if the watches around have received it before.
  bool have_others_been_told(const at::TensorBase& tensor, uint64_t made_at);

  /// A tensor that this watch and those around it have received.
  struct Told {
    c10::VariableVersion counter;     ///< prevents its address from being reused
    const c10::StorageImpl* storage;  ///< only compared
    uint64_t made_at;                 ///< the lowest number of its nodes; 0: no node
  };
  uint64_t passed_over_from_ = UINT64_MAX, passed_over_thread_ = 0;
  std::vector<Told> told_;     // the latest ones, in a ring
  std::size_t next_told_ = 0;  // the next place, once the ring is full
  NodeWatch* outer_ = nullptr;
  std::shared_ptr<NodeWatch> self_;  // while it is in a thread's list
};

/// The watches of this thread, innermost first.
///
/// Note [Nested watches]
/// If all watches received each tensor, the cost of an operator would grow with the number of
/// regions around it. A node that was made in a region was made in all regions around it, so the
/// walk ends at the first watch that skips the node. A watch remembers the tensors that it
/// received: the watches around it received them too, so the walk ends there. The watch of a
/// recompute sees every operator and is not part of this list.
class NodeWatches {
 public:
  /// Adds a watch.
  static void begin(std::shared_ptr<NodeWatch> watch);
  /// Removes the innermost watches that are over. A watch that ended before an inner one, or on
  /// another thread, is removed by a later call.
  static void end();
  static void tell(const at::TensorBase& tensor, const torch::autograd::Node* node);
  /// Returns whether any thread has a watch, so that others need not look.
  static bool any() { return num_told_.load(std::memory_order_relaxed) > 0; }

 private:
  friend class OnlyNodeWatch;
  struct AtThreadExit;
  static void drop_innermost();
  static inline std::atomic<int64_t> num_told_{0};
};

/// Makes `watch` the only watch of the thread while alive, or leaves none if it is null. The watch
/// must outlive this object.
class OnlyNodeWatch {
 public:
  explicit OnlyNodeWatch(NodeWatch* watch);
  ~OnlyNodeWatch();
  OnlyNodeWatch& operator=(OnlyNodeWatch&&) = delete;

 private:
  NodeWatch* const before_;
  NodeWatch* const only_before_;
};

/// Installs our table in front. Call it once.
void install(const RegistrationCallbacks& callbacks);

/// Returns whether the hook with that handle is still on the tensor.
bool has_hook(const at::TensorBase& tensor, unsigned handle);

}  // namespace remat::seam
