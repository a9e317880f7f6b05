#pragma once
// The only place that touches the autograd engine and LibTorch's unstable parts.
//
// Note [The forwarding engine]
// C++ LibTorch calls `Engine::get_default_saved_variable_hooks()` before it saves a tensor, and the
// base engine returns null. We install an engine that answers this one question and forwards
// everything else to the previous engine. Replacing the engine instead would break programs that
// ran a backward earlier: the device threads belong to the old object. If torch is imported into
// the process later, Python's engine is installed over ours, so every scope entry installs again.
//
// Note [Where the scopes live]
// Scopes are stored in `at::impl::ThreadLocalPythonObjects`, under a key of our own. LibTorch
// carries its contents to every thread that runs a node of a backward, including re-entrant ones.
// With a plain thread_local, an engine thread would see the scopes of earlier work on that thread.
// The entries carry an interpreter, of which LibTorch only ever calls incref and decref.

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/stack.h>
#include <c10/core/SafePyObject.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lib/seam/dispatch_mode.h"
#include "lib/seam/variable_hooks.h"

namespace remat::seam {

/// The functions that our engine calls; plain functions, set once.
struct EngineCallbacks {
  /// Returns null if we have no hooks. Sets `is_decided` if no other hooks may be used either.
  std::unique_ptr<torch::autograd::SavedVariableHooks> (*make_hooks)(bool& is_decided);
  /// Gets the non-null hooks of another language that would be used; returns the hooks to use.
  std::unique_ptr<torch::autograd::SavedVariableHooks> (*surround_foreign)(
      std::unique_ptr<torch::autograd::SavedVariableHooks> hooks);
  /// Called when this thread is about to run, and wait for, a backward from `roots` to `outputs`
  /// (empty: to all leaves). `accumulates`: into leaves, instead of returning gradients.
  void (*backward_begins)(const torch::autograd::edge_list& roots,
                          const torch::autograd::edge_list& outputs, bool accumulates);
  /// Called when the backward has ended. `gradients`: those that it returns, empty if it threw;
  /// `given`: the gradients of its roots. Throws nothing.
  void (*backward_ended)(const torch::autograd::variable_list& gradients,
                         const torch::autograd::variable_list& given);
  /// Called after backward_ended(), if the backward returned. May throw an exception that ends the
  /// calling function.
  void (*backward_returned)();
  OperatorHandler run_operator;
  RegistrationCallbacks registrations;
};

/// Makes our engine the default one, unless it is already. Cheap when it is.
void install(const EngineCallbacks& callbacks);

/// An entry that LibTorch carries with each thread's state, at most one a thread.
class ThreadEntry {
 public:
  ThreadEntry();
  virtual ~ThreadEntry() = default;
  ThreadEntry& operator=(ThreadEntry&&) = delete;

  /// The part of the entry that LibTorch holds.
  struct Handle : c10::SafePyObject {
    explicit Handle(ThreadEntry* owner);
    ThreadEntry* const entry;
  };

 private:
  friend std::shared_ptr<c10::SafePyObject> handle_of(std::shared_ptr<ThreadEntry> entry);
  Handle handle_;
};

/// Returns the entry that LibTorch carries with the thread's state, or null.
ThreadEntry* thread_entry();
std::shared_ptr<ThreadEntry> share_thread_entry();
/// The thread's entry and LibTorch's own (Python's) hooks, found by one look-up.
struct ThreadView {
  ThreadEntry* entry;
  const at::impl::SavedTensorDefaultHooksTLS& foreign_hooks;
};
ThreadView thread_view();
/// Replaces the entry, or removes it if `entry` is null; returns the previous one.
std::shared_ptr<ThreadEntry> exchange_thread_entry(std::shared_ptr<ThreadEntry> entry);

/// Returns whether LibTorch would save a tensor on this thread without hooks now.
bool saves_plainly();

/// Counts the hooks on LibTorch's own (Python's) hook stack of this thread.
int64_t foreign_hook_depth();
/// Forbids pushing hooks there; present ones may stay.
void forbid_foreign_hooks(const std::string& message);

/// Makes a node, in the pointer type of this LibTorch (std::shared_ptr before 2.13).
template <class N, class... Arguments>
NodePtr make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>)
    return std::make_shared<N>(std::forward<Arguments>(arguments)...);
  else
    return c10::make_intrusive<N>(std::forward<Arguments>(arguments)...);
}

/// A node where gradients end.
class EndNode final : public torch::autograd::Node {
 public:
  explicit EndNode(const char* name) : name_(name) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { return {}; }
  std::string name() const override { return name_; }

 private:
  const char* const name_;
};

/// Visits every node that a backward from the roots may reach, once, the nearer ones first.
template <class Visitor>
void visit_nodes(const torch::autograd::edge_list& roots, Visitor&& visitor) {
  std::vector<NodePtr> nodes;
  std::unordered_set<const torch::autograd::Node*> seen;
  const auto reach = [&](const torch::autograd::Edge& edge) {
    if (edge.is_valid() && seen.insert(edge.function.get()).second) nodes.push_back(edge.function);
  };
  for (const torch::autograd::Edge& root : roots) reach(root);
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    for (const torch::autograd::Edge& next : nodes[i]->next_edges()) reach(next);
    visitor(nodes[i]);
  }
}

/// Returns the nodes below a tensor, in the order in which backward would run them.
std::vector<NodePtr> nodes_below(const at::Tensor& root);

/// Returns the name of the node with that sequence number, if the node that a backward runs on this
/// thread is it or leads to it. Empty if there is none, or another thread made it. Walks the graph:
/// for errors only.
std::string name_of_node(uint64_t sequence_number);
/// Returns the name of the node with that sequence number if `current` is it or leads to it; empty
/// for null.
std::string name_of_node(uint64_t sequence_number, const torch::autograd::Node* current);

/// Returns the id of the backward that runs on this thread, -1 outside.
int64_t graph_task_id();
/// Names a node without keeping it alive.
class NodeMark {
 public:
  NodeMark() = default;
  explicit NodeMark(const NodePtr& node);
  bool is_null() const { return node_ == nullptr; }
  /// Returns whether the backward that runs on this thread runs the node, or has run it.
  bool will_run() const;

 private:
  torch::autograd::Node* node_ = nullptr;
  uint64_t sequence_nr_ = 0, thread_id_ = 0;
};

/// Destroys `closure` (after calling it, on success) when the backward that runs here ends.
void at_end_of_graph_task(std::function<void()> closure);

}  // namespace remat::seam
