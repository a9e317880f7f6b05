#include "lib/seam/engine.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
#include <torch/csrc/autograd/node_creation_hook.h>
#define REMAT_HAS_NODE_CREATION_HOOKS 1
#endif

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "lib/seam/interpreter.h"
#include "lib/seam/torch_version.h"

namespace remat::seam {

namespace {

using torch::autograd::Engine;

EngineCallbacks engine_callbacks{};

/// A string of this length has no memory of its own, and two are compared in a few instructions.
constexpr std::size_t slot_key_length = 15;

/// Names this copy of the library: two copies in one process need distinct keys.
const std::string& slot_key() {
  static const std::string key = [] {
    static const char here = 0;
    const uint64_t place = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(&here)) >> 4;
    return fmt::format("rm{:013x}", place & ((uint64_t{1} << 52) - 1));
  }();
  return key;
}

using at::impl::ThreadLocalPythonObjects;
using EntryMap = std::unordered_map<std::string, std::shared_ptr<c10::SafePyObject>>;

// Note [Reading the entry]
// Every saved tensor looks up the entry. The public way, `contains` and then `get`, hashes the key
// three times and was a tenth of the cost of a small region. So the map itself is read, and a map
// with one entry is checked without a search.
//
// Every region inserts the entry twice and removes it twice, since a key left behind would cost
// every node of every backward a copy of the map. Usually there is no other entry, so a map with
// our entry alone is stored in between and swapped with the empty one. In a backward that Python
// began there is another entry, the context's; then the map's node is stored. The explicit
// instantiation below may name a private member; a LibTorch without it does not compile.
EntryMap ThreadLocalPythonObjects::* entry_map_of(ThreadLocalPythonObjects*);
template <EntryMap ThreadLocalPythonObjects::* member>
struct EntryMapAccess {
  friend EntryMap ThreadLocalPythonObjects::* entry_map_of(ThreadLocalPythonObjects*) {
    return member;
  }
};
template struct EntryMapAccess<&ThreadLocalPythonObjects::obj_dict_>;

/// Memory for an entry, while the thread has none.
struct Spare {
  EntryMap map{{slot_key(), nullptr}};  ///< with our key and a null entry; empty while in use
  EntryMap::node_type node;             ///< for a map with other entries; may be empty
  ~Spare();
};

/// Data that a thread looks up once. Without constructor or destructor, so that reading it costs no
/// check.
struct ThreadPart {
  EntryMap* entries = nullptr;
  Spare* spare = nullptr;
  const std::string* key = nullptr;
  const at::impl::SavedTensorDefaultHooksTLS* foreign_hooks = nullptr;
  bool is_ending = false;  ///< scopes may still close after the spare is gone
};
constinit thread_local ThreadPart thread_part;

Spare::~Spare() {
  thread_part.spare = nullptr;
  thread_part.is_ending = true;
}

/// LibTorch returns its map as const, but the map itself is not const.
[[gnu::noinline]] void fill(ThreadPart& part) {
  part.key = &slot_key();
  part.foreign_hooks = &at::SavedTensorDefaultHooks::get_tls_state();
  if (!part.is_ending) {
    thread_local Spare spare;
    part.spare = &spare;
  }
  part.entries =
      const_cast<EntryMap*>(&(ThreadLocalPythonObjects::get_state().*
                              entry_map_of(static_cast<ThreadLocalPythonObjects*>(nullptr))));
}

/// Returns this thread's part. The `asm` keeps the compiler from repeating the thread-local
/// look-up.
inline ThreadPart& this_thread() {
  ThreadPart* part = &thread_part;
  asm("" : "+r"(part));
  if (part->entries == nullptr) fill(*part);
  return *part;
}

/// Returns our entry among the entries, which must not be empty; or the end.
EntryMap::iterator find_entry(const ThreadPart& part) {
  EntryMap& entries = *part.entries;
  const std::string& key = *part.key;
  if (entries.size() > 1) return entries.find(key);
  const std::string& only = entries.begin()->first;
  const bool is_ours =
      only.size() == slot_key_length && std::memcmp(only.data(), key.data(), slot_key_length) == 0;
  return is_ours ? entries.begin() : entries.end();
}

/// See Note [The forwarding engine].
class ForwardingEngine final : public Engine {
 public:
  explicit ForwardingEngine(Engine& previous) : previous_(previous) {}

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override;

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task, NodePtr graph_root,
      torch::autograd::InputBuffer&& input_buffer) override {
    return previous_.execute_with_graph_task(graph_task, std::move(graph_root),
                                             std::move(input_buffer));
  }

  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return previous_.make_anomaly_metadata();
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override;

#ifdef REMAT_HAS_NODE_CREATION_HOOKS
  decltype(std::declval<Engine&>().get_node_creation_hooks()) get_node_creation_hooks() override {
    return previous_.get_node_creation_hooks();
  }
#endif

 private:
  Engine& previous_;
};

std::atomic<ForwardingEngine*> installed{nullptr};

torch::autograd::variable_list ForwardingEngine::execute(
    const torch::autograd::edge_list& roots, const torch::autograd::variable_list& inputs,
    bool keep_graph, bool create_graph, bool accumulate_grad,
    const torch::autograd::edge_list& outputs) {
  engine_callbacks.backward_begins(roots, outputs, accumulate_grad);
  torch::autograd::variable_list gradients;
  struct Ended {
    const torch::autograd::variable_list &gradients, &given;
    ~Ended() { engine_callbacks.backward_ended(gradients, given); }
  };
  {
    const Ended ended{gradients, inputs};
    gradients =
        previous_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  engine_callbacks.backward_returned();
  return gradients;
}

std::unique_ptr<torch::autograd::SavedVariableHooks>
ForwardingEngine::get_default_saved_variable_hooks() {
  bool is_decided = false;
  auto hooks = engine_callbacks.make_hooks(is_decided);
  if (hooks != nullptr || is_decided) return hooks;
  hooks = previous_.get_default_saved_variable_hooks();
  return hooks == nullptr ? nullptr : engine_callbacks.surround_foreign(std::move(hooks));
}

}  // namespace

void install(const EngineCallbacks& callbacks) {
  ForwardingEngine* const ours = installed.load(std::memory_order_acquire);
  if (ours != nullptr && &Engine::get_default_engine() == ours) return;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  Engine& current = Engine::get_default_engine();
  ForwardingEngine* const latest = installed.load(std::memory_order_relaxed);
  if (&current == latest) return;
  if (latest == nullptr) {  // set only once
    refuse_other_torch();
    engine_callbacks = callbacks;
    set_operator_handler(callbacks.run_operator);
    install(callbacks.registrations);
  }
  // Leaked: engines own no threads here, and their teardown order would matter.
  installed.store(new ForwardingEngine(current), std::memory_order_release);
  torch::autograd::set_default_engine_stub(
      +[]() -> Engine& { return *installed.load(std::memory_order_acquire); });
}

ThreadEntry::Handle::Handle(ThreadEntry* owner)
    : SafePyObject(reinterpret_cast<PyObject*>(owner), interpreter()), entry(owner) {}

ThreadEntry::ThreadEntry() : handle_(this) {}

std::shared_ptr<c10::SafePyObject> handle_of(std::shared_ptr<ThreadEntry> entry) {
  c10::SafePyObject* const handle = &entry->handle_;
  return {std::move(entry), handle};
}

namespace {

ThreadEntry* entry_behind(const c10::SafePyObject& handle) {
  return static_cast<const ThreadEntry::Handle&>(handle)
      .entry;  // our key is not used for other handles
}

std::shared_ptr<ThreadEntry> entry_behind(std::shared_ptr<c10::SafePyObject> handle) {
  if (handle == nullptr) return nullptr;
  ThreadEntry* const entry = entry_behind(*handle);
  return {std::move(handle), entry};
}

}  // namespace

namespace {
ThreadEntry* entry_of(const ThreadPart& part) {
  if (part.entries->empty()) return nullptr;
  const auto found = find_entry(part);
  return found == part.entries->end() || found->second == nullptr ? nullptr
                                                                  : entry_behind(*found->second);
}

/// See Note [Reading the entry]. Requires that our entry is absent.
void add_entry(const ThreadPart& part, std::shared_ptr<c10::SafePyObject> handle) {
  EntryMap& entries = *part.entries;
  Spare* const spare = part.spare;
  if (spare != nullptr && entries.empty() && !spare->map.empty()) {
    entries.swap(spare->map);
    entries.begin()->second = std::move(handle);
  } else if (spare != nullptr && !spare->node.empty()) {
    spare->node.mapped() = std::move(handle);
    try {
      entries.insert(std::move(spare->node));
    } catch (...) {  // out of memory
      if (!spare->node.empty()) spare->node.mapped() = nullptr;
      throw;
    }
  } else {
    entries.emplace(*part.key, std::move(handle));
  }
}

/// See Note [Reading the entry]. The entry's pointer has been moved from.
void remove_entry(const ThreadPart& part, EntryMap::iterator ours) {
  EntryMap& entries = *part.entries;
  Spare* const spare = part.spare;
  if (spare != nullptr && entries.size() == 1 && spare->map.empty()) {
    ours->second = nullptr;
    entries.swap(spare->map);
  } else if (spare != nullptr && spare->node.empty()) {
    ours->second = nullptr;
    spare->node = entries.extract(ours);
  } else {
    entries.erase(ours);
  }
}

}  // namespace

ThreadEntry* thread_entry() { return entry_of(this_thread()); }

ThreadView thread_view() {
  const ThreadPart& part = this_thread();
  return {entry_of(part), *part.foreign_hooks};
}

std::shared_ptr<ThreadEntry> share_thread_entry() {
  const ThreadPart& part = this_thread();
  if (part.entries->empty()) return nullptr;
  const auto found = find_entry(part);
  return found == part.entries->end() ? nullptr : entry_behind(found->second);
}

std::shared_ptr<ThreadEntry> exchange_thread_entry(std::shared_ptr<ThreadEntry> entry) {
  ThreadPart& part = this_thread();
  EntryMap& entries = *part.entries;
  const auto found = entries.empty() ? entries.end() : find_entry(part);
  if (found == entries.end()) {
    if (entry != nullptr) add_entry(part, handle_of(std::move(entry)));
    return nullptr;
  }
  auto previous = entry_behind(std::move(found->second));
  if (entry != nullptr)
    found->second = handle_of(std::move(entry));
  else
    remove_entry(part, found);
  return previous;
}

bool saves_plainly() {
  return Engine::get_default_engine().get_default_saved_variable_hooks() == nullptr;
}

int64_t foreign_hook_depth() {
  return static_cast<int64_t>(at::SavedTensorDefaultHooks::get_tls_state().stack.size());
}

namespace {

template <class Hooks>
void forbid(const std::string& message) {
  if constexpr (requires { Hooks::disable(message, /*fail_if_non_empty=*/false); }) {
    Hooks::disable(message, /*fail_if_non_empty=*/false);
  } else {  // before 2.8 it refuses while there are hooks
    auto state = Hooks::get_tls_state();
    state.disabled_error_message = message;
    Hooks::set_tls_state(state);
  }
}

}  // namespace

void forbid_foreign_hooks(const std::string& message) {
  forbid<at::SavedTensorDefaultHooks>(message);
}

std::string name_of_node(uint64_t sequence_number) {
  const NodePtr current = torch::autograd::get_current_node();
  return name_of_node(sequence_number, current.get());
}

std::string name_of_node(uint64_t sequence_number, const torch::autograd::Node* current) {
  if (current == nullptr) return {};
  // Numbers grow on each thread: a node that leads to the wanted one has a higher number.
  std::vector<const torch::autograd::Node*> waiting{current};
  std::unordered_set<const torch::autograd::Node*> seen{current};
  while (!waiting.empty()) {
    const torch::autograd::Node& node = *waiting.back();
    waiting.pop_back();
    if (node.sequence_nr() == sequence_number) return node.name();
    for (const torch::autograd::Edge& next : node.next_edges())
      if (next.is_valid() && next.function->thread_id() == current->thread_id() &&
          next.function->sequence_nr() >= sequence_number &&
          seen.insert(next.function.get()).second)
        waiting.push_back(next.function.get());
  }
  return {};
}

int64_t graph_task_id() { return torch::autograd::get_current_graph_task_id(); }

std::vector<NodePtr> nodes_below(const at::Tensor& root) {
  std::vector<NodePtr> nodes;
  if (!root.defined()) return nodes;
  visit_nodes({{root.grad_fn(), 0}}, [&nodes](const NodePtr& node) { nodes.push_back(node); });
  std::stable_sort(nodes.begin(), nodes.end(), [](const NodePtr& a, const NodePtr& b) {
    return a->sequence_nr() > b->sequence_nr();
  });
  return nodes;
}

NodeMark::NodeMark(const NodePtr& node) : node_(node.get()) {
  if (node_ == nullptr) return;
  sequence_nr_ = node_->sequence_nr();
  thread_id_ = node_->thread_id();
}

bool NodeMark::will_run() const {
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (node_ == nullptr || nodes == nullptr || nodes->count(node_) == 0) return false;
  // The node is alive, but another one may have had its address before.
  if (node_->sequence_nr() != sequence_nr_ || node_->thread_id() != thread_id_) return false;
  const auto* const chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) return true;
  const auto found = chosen->find(node_);
  return found != chosen->end() && found->second.needed_;
}

void at_end_of_graph_task(std::function<void()> closure) {
  Engine::get_default_engine().queue_callback(std::move(closure));
}

}  // namespace remat::seam
