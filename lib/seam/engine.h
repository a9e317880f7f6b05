#pragma once
// The only place that touches the autograd engine and LibTorch's unstable parts.
//
// Note [The forwarding engine]
// C++ LibTorch asks `Engine::get_default_saved_variable_hooks()` before it saves a tensor, and the
// base engine answers "none". We install an engine that forwards everything to the engine that was
// there before and answers this one question. Replacing the engine instead would break programs
// that ran a backward earlier: the device threads belong to the old object. Importing torch into
// the process later installs Python's engine over ours, so every scope entry installs again.
//
// Note [Where the scopes live]
// In `at::impl::ThreadLocalPythonObjects`, under a key of our own: LibTorch carries its contents to
// every thread that runs a node of a backward, also to re-entrant ones. A plain thread_local would
// show an engine thread the scopes of whatever ran there before. The entries carry an interpreter
// of which LibTorch only ever calls incref and decref.

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

/// What we put into the engine; plain functions, set once.
struct EngineCallbacks {
  /// Returns null for none of ours. Sets `is_decided` if nobody else's are wanted either.
  std::unique_ptr<torch::autograd::SavedVariableHooks> (*make_hooks)(bool& is_decided);
  /// Gets the hooks of another language's that are asked instead, of which there are some; returns
  /// what to ask.
  std::unique_ptr<torch::autograd::SavedVariableHooks> (*surround_foreign)(
      std::unique_ptr<torch::autograd::SavedVariableHooks> hooks);
  /// This thread is about to run, and wait for, a backward from `roots` to `outputs` (none: to all
  /// leaves). `accumulates`: into leaves, instead of returning gradients.
  void (*backward_begins)(const torch::autograd::edge_list& roots,
                          const torch::autograd::edge_list& outputs, bool accumulates);
  /// The backward has ended, and returns these; none if it threw. `given`: the gradients of its
  /// roots. Throws nothing.
  void (*backward_ended)(const torch::autograd::variable_list& gradients,
                         const torch::autograd::variable_list& given);
  /// After that, if it returned. May throw what ends the function that ran it.
  void (*backward_returned)();
  OperatorHandler run_operator;
  RegistrationCallbacks registrations;
};

/// Makes our engine the default one, unless it is already. Cheap when it is.
void install(const EngineCallbacks& callbacks);

/// LibTorch can carry one such entry with each thread's state.
class ThreadEntry {
 public:
  ThreadEntry();
  virtual ~ThreadEntry() = default;
  ThreadEntry& operator=(ThreadEntry&&) = delete;

  /// What LibTorch holds of it.
  struct Handle : c10::SafePyObject {
    explicit Handle(ThreadEntry* owner);
    ThreadEntry* const entry;
  };

 private:
  friend std::shared_ptr<c10::SafePyObject> handle_of(std::shared_ptr<ThreadEntry> entry);
  Handle handle_;
};

/// LibTorch carries this entry with the thread's state; null: there is none.
ThreadEntry* thread_entry();
std::shared_ptr<ThreadEntry> share_thread_entry();
/// The same, and LibTorch's own (Python's) hooks, for the price of one look-up.
struct ThreadView {
  ThreadEntry* entry;
  const at::impl::SavedTensorDefaultHooksTLS& foreign_hooks;
};
ThreadView thread_view();
/// Replaces it, null removes it; returns what was there.
std::shared_ptr<ThreadEntry> exchange_thread_entry(std::shared_ptr<ThreadEntry> entry);

/// Whether LibTorch would save a tensor on this thread without hooks now.
bool saves_plainly();

/// Counts the hooks on LibTorch's own (Python's) hook stack of this thread.
int64_t foreign_hook_depth();
/// Lets none be pushed there; those that are there may stay.
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

/// Visits every node that a backward from the roots may come to, once, the nearer ones first.
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

/// The name of the node with that sequence number, if the node that a backward runs on this thread
/// is it or leads to it and the same thread made both; else empty. Walks the graph: for errors.
std::string name_of_node(uint64_t sequence_number);
/// The same from `current` on; empty for null.
std::string name_of_node(uint64_t sequence_number, const torch::autograd::Node* current);

/// The id of the backward that runs on this thread, -1 outside.
int64_t graph_task_id();
/// Destroys `closure` (after calling it, on success) when the backward that runs here ends.
void at_end_of_graph_task(std::function<void()> closure);

}  // namespace remat::seam
