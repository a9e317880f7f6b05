#pragma once
// Sees what functions register on tensors and whose nodes they ask for, and says where gradients of
// leaves go in recomputes.
//
// Note [Seeing registrations]
// `Tensor::register_hook`, `requires_grad_` and `grad_fn` reach LibTorch through one table of
// functions, VariableHooksInterface. We put a table in front of it that forwards everything, as our
// engine does (Note [The forwarding engine]). What goes past the table (`set_requires_grad`, hooks
// put on nodes by hand) cannot be seen as it happens: Note [Tensors from outside].

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

/// The thread that registers calls them; plain functions, set once.
struct RegistrationCallbacks {
  /// A hook is about to be registered on a tensor. The handle of one that stands for it, with which
  /// nothing is registered; or none.
  std::optional<unsigned> (*hook_begins)(const at::TensorBase& tensor);
  /// The hook has been registered, and has this handle.
  void (*hook_registered)(const at::TensorBase& tensor, unsigned handle);
  /// `requires_grad_` is about to be called.
  void (*requires_grad_changes)(const at::TensorBase& tensor);
  /// A node that is said to be a tensor's `grad_fn` on this thread; null: what LibTorch says. Asked
  /// only while any NodesInstead is alive.
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

/// A node watch is told of the tensors whose `grad_fn` is asked for on a thread. An operator asks
/// for those of all tensors through which gradients may flow, when its own node has been made and
/// its kernel has not run.
class NodeWatch {
 public:
  NodeWatch() = default;
  virtual ~NodeWatch() = default;
  NodeWatch& operator=(NodeWatch&&) = delete;
  /// False from when it is over: then it is told nothing, on whatever thread it ended.
  virtual bool is_watching() const = 0;
  /// `node`: the answer; null for a leaf.
  virtual void node_asked(const at::TensorBase& tensor, const torch::autograd::Node* node) = 0;

 protected:
  /// It need not be told of nodes that this thread has made from this sequence number on.
  void pass_over_from(uint64_t sequence, uint64_t thread) {
    passed_over_from_ = sequence;
    passed_over_thread_ = thread;
  }

 private:
  friend class NodeWatches;
  friend class OnlyNodeWatch;
  /// Remembers the tensor. Returns true if the watches around were told of it before.
  bool have_others_been_told(const at::TensorBase& tensor, uint64_t made_at);

  /// A tensor of which this watch and those around it have been told.
  struct Told {
    c10::VariableVersion counter;     ///< keeps its address from being used again
    const c10::StorageImpl* storage;  ///< only compared
    uint64_t made_at;                 ///< the number of the node, which was the oldest; 0: no node
  };
  uint64_t passed_over_from_ = UINT64_MAX, passed_over_thread_ = 0;
  std::vector<Told> told_;     // the last ones, in a ring
  std::size_t next_told_ = 0;  // where the next one comes, once the ring is full
  NodeWatch* outer_ = nullptr;
  std::shared_ptr<NodeWatch> self_;  // while it is among those of a thread
};

/// Those of this thread, innermost first.
///
/// Note [Nested watches]
/// If each tensor were told to all watches, the cost of an operator would grow with the number of
/// regions around it. A node that was made in a region was made in all regions around it, so the
/// walk ends at the first watch that passes over the node. A watch remembers the tensors that it
/// was told: the watches around it were told them too, so the walk ends there. The watch of a
/// recompute sees every operator and is not part of this list.
class NodeWatches {
 public:
  /// From now on it is told, too.
  static void begin(std::shared_ptr<NodeWatch> watch);
  /// Lets go of those that are over. One that ended before an inner one, or on another thread, goes
  /// with a later call.
  static void end();
  static void tell(const at::TensorBase& tensor, const torch::autograd::Node* node);
  /// Whether any thread has one: saves the others from looking.
  static bool any() { return num_told_.load(std::memory_order_relaxed) > 0; }

 private:
  friend class OnlyNodeWatch;
  struct AtThreadExit;
  static void drop_innermost();
  static inline std::atomic<int64_t> num_told_{0};
};

/// While alive this watch alone is told on the thread, or none if it is null. It outlives this.
class OnlyNodeWatch {
 public:
  explicit OnlyNodeWatch(NodeWatch* watch);
  ~OnlyNodeWatch();
  OnlyNodeWatch& operator=(OnlyNodeWatch&&) = delete;

 private:
  NodeWatch* const before_;
  NodeWatch* const only_before_;
};

/// Puts our table in front. Call it once.
void install(const RegistrationCallbacks& callbacks);

/// Whether the hook with that handle is still on the tensor.
bool has_hook(const at::TensorBase& tensor, unsigned handle);

}  // namespace remat::seam
