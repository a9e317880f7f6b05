#include "lib/engine_seam.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/ThreadLocalPythonObjects.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
#include <torch/csrc/autograd/node_creation_hook.h>
#define REMAT_HAS_NODE_CREATION_HOOKS 1
#endif

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace remat::seam {

namespace {

using torch::autograd::Engine;

EngineCallbacks engine_callbacks{};
thread_local bool is_handling = false;

/// The only interpreter calls LibTorch makes on our entries are incref and decref, and the entries
/// count their owners themselves; on our mode it calls `dispatch`, and `detach`, where null means the
/// plain copy. Signatures of several releases stand side by side; the one that
/// matches the base overrides it, so none is marked `override`.
struct Interpreter : c10::impl::PyInterpreterVTable {
  using TensorImpl = c10::TensorImpl;
  [[noreturn]] static void refuse() {
    TORCH_CHECK(false, "remat: LibTorch called an interpreter that only holds scopes");
  }
#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsuggest-override"
#if defined(__clang__)
#pragma GCC diagnostic ignored "-Winconsistent-missing-override"
#pragma GCC diagnostic ignored "-Woverloaded-virtual"
#endif
#endif
  std::string name() const { return "remat"; }
  void incref(PyObject*) const {}
  void decref(PyObject*) const {}
  void decref(PyObject*, bool) const {}
#if __has_include(<c10/core/impl/PyObjectSlot.h>)
  bool try_incref(const c10::impl::PyObjectSlot&) const { return true; }
#endif
  size_t refcnt(PyObject*) const { return 1; }
  c10::intrusive_ptr<TensorImpl> detach(const TensorImpl* self) const {
    if (self->layout() == c10::kStrided && !self->key_set().has(c10::DispatchKey::NestedTensor))
      return {};
    // Only dense tensors have a plain copy to fall back to.
    const OperatorsUnseen unseen;
    return self->shallow_copy_and_detach(self->version_counter(),
                                         self->allow_tensor_metadata_change());
  }
  void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) const {
    struct Off {  // it is the topmost one, or it would not have been called
      std::shared_ptr<c10::impl::PyObject_TorchDispatchMode> mode =
          c10::impl::TorchDispatchModeTLS::pop_stack();
      ~Off() { c10::impl::TorchDispatchModeTLS::push_non_infra_mode_onto_stack(std::move(mode)); }
    } off;
    struct Handling {
      const bool outer = std::exchange(is_handling, true);
      ~Handling() { is_handling = outer; }
    } handling;
    engine_callbacks.run_operator(op, *stack);
  }
  void reportErrorCallback(PyObject*, c10::DispatchKey) const { refuse(); }
  void python_op_registration_trampoline(const c10::OperatorHandle&, c10::DispatchKey,
                                         c10::DispatchKeySet, torch::jit::Stack*, bool,
                                         bool) const {
    refuse();
  }
  void throw_abstract_impl_not_imported_error(std::string, const char*, const char*) const {
    refuse();
  }
  void python_dispatcher(const c10::OperatorHandle&, c10::DispatchKeySet,
                         torch::jit::Stack*) const {
    refuse();
  }
  bool is_contiguous(const TensorImpl*, at::MemoryFormat) const { refuse(); }
  c10::SymBool sym_is_contiguous(const TensorImpl*, at::MemoryFormat) const { refuse(); }
  bool is_strides_like(const TensorImpl*, at::MemoryFormat) const { refuse(); }
  bool is_non_overlapping_and_dense(const TensorImpl*) const { refuse(); }
  c10::Device device(const TensorImpl*) const { refuse(); }
  int64_t dim(const TensorImpl*) const { refuse(); }
  c10::IntArrayRef strides(const TensorImpl*) const { refuse(); }
  c10::IntArrayRef sizes(const TensorImpl*) const { refuse(); }
  c10::SymIntArrayRef sym_sizes(const TensorImpl*) const { refuse(); }
  c10::Layout layout(const TensorImpl*) const { refuse(); }
  int64_t numel(const TensorImpl*) const { refuse(); }
  c10::SymInt sym_numel(const TensorImpl*) const { refuse(); }
  c10::SymIntArrayRef sym_strides(const TensorImpl*) const { refuse(); }
  c10::SymInt sym_storage_offset(const TensorImpl*) const { refuse(); }
  void trace_gpu_event_creation(c10::DeviceType, uintptr_t) const {}
  void trace_gpu_event_deletion(c10::DeviceType, uintptr_t) const {}
  void trace_gpu_event_record(c10::DeviceType, uintptr_t, uintptr_t) const {}
  void trace_gpu_event_wait(c10::DeviceType, uintptr_t, uintptr_t) const {}
  void trace_gpu_memory_allocation(c10::DeviceType, uintptr_t) const {}
  void trace_gpu_memory_deallocation(c10::DeviceType, uintptr_t) const {}
  void trace_gpu_stream_creation(c10::DeviceType, uintptr_t) const {}
  void trace_gpu_device_synchronization(c10::DeviceType) const {}
  void trace_gpu_stream_synchronization(c10::DeviceType, uintptr_t) const {}
  void trace_gpu_event_synchronization(c10::DeviceType, uintptr_t) const {}
  void reset_backward_hooks(const TensorImpl*) const {}
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif
};

/// Leaked: entries may outlive static destruction.
c10::impl::PyInterpreter* interpreter() {
  static auto* const vtable = new Interpreter;
  static auto* const tag = new c10::impl::PyInterpreter(vtable);
  return tag;
}

/// Names this copy of the library: two copies in one process need distinct keys.
const std::string& slot_key() {
  static const std::string key = [] {
    static const char here = 0;
    return "rm" + std::to_string(reinterpret_cast<uintptr_t>(&here) >> 4);
  }();
  return key;
}

using at::impl::ThreadLocalPythonObjects;
using EntryMap = std::unordered_map<std::string, std::shared_ptr<c10::SafePyObject>>;

// Note [Reading the entry]
// Every saved tensor asks for the entry. The public way, `contains` and then `get`, hashes the key
// three times and was a tenth of the cost of a small region; so the map itself is read. Every region
// puts the entry in twice and takes it out twice (a key left behind would cost every node of every
// backward a copy of the map), so the map's node is kept in between. The explicit instantiation below
// may name a private member; a LibTorch without it does not compile.
EntryMap ThreadLocalPythonObjects::* entry_map_of(ThreadLocalPythonObjects*);
template <EntryMap ThreadLocalPythonObjects::* member>
struct EntryMapAccess {
  friend EntryMap ThreadLocalPythonObjects::* entry_map_of(ThreadLocalPythonObjects*) {
    return member;
  }
};
template struct EntryMapAccess<&ThreadLocalPythonObjects::obj_dict_>;

/// The map's node while the thread has no entry.
struct SpareNode {
  EntryMap::node_type node;
  ~SpareNode();
};

/// What a thread looks up once. Without constructor or destructor, so that reading it costs no check.
struct ThreadPart {
  EntryMap* entries = nullptr;
  SpareNode* spare = nullptr;
  bool is_ending = false;  ///< scopes may still close after the spare node is gone
};
constinit thread_local ThreadPart thread_part;

SpareNode::~SpareNode() {
  thread_part.spare = nullptr;
  thread_part.is_ending = true;
}

/// This thread's own map. It is handed out read-only, but what is handed out is no constant.
EntryMap& entry_map(ThreadPart& part) {
  if (part.entries == nullptr) {
    part.entries =
        const_cast<EntryMap*>(&(ThreadLocalPythonObjects::get_state().*
                                entry_map_of(static_cast<ThreadLocalPythonObjects*>(nullptr))));
    if (!part.is_ending) {
      thread_local SpareNode spare;
      part.spare = &spare;
    }
  }
  return *part.entries;
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
  engine_callbacks.backward_begins(roots, outputs);
  return previous_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
}

std::unique_ptr<torch::autograd::SavedVariableHooks>
ForwardingEngine::get_default_saved_variable_hooks() {
  bool is_decided = false;
  auto hooks = engine_callbacks.make_hooks(is_decided);
  if (hooks != nullptr || is_decided) return hooks;
  return previous_.get_default_saved_variable_hooks();
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
  if (latest == nullptr) engine_callbacks = callbacks;  // constant afterwards
  // Leaked: engines own no threads here, and their teardown order would matter.
  installed.store(new ForwardingEngine(current), std::memory_order_release);
  torch::autograd::set_default_engine_stub(
      +[]() -> Engine& { return *installed.load(std::memory_order_acquire); });
}

ThreadEntry::ThreadEntry() : handle_(reinterpret_cast<PyObject*>(this), interpreter()) {}

std::shared_ptr<c10::SafePyObject> handle_of(std::shared_ptr<ThreadEntry> entry) {
  c10::SafePyObject* const handle = &entry->handle_;
  return {std::move(entry), handle};
}

namespace {

ThreadEntry* entry_behind(const c10::SafePyObject& handle) {
  return reinterpret_cast<ThreadEntry*>(handle.ptr(interpreter()));
}

std::shared_ptr<ThreadEntry> entry_behind(std::shared_ptr<c10::SafePyObject> handle) {
  if (handle == nullptr) return nullptr;
  ThreadEntry* const entry = entry_behind(*handle);
  return {std::move(handle), entry};
}

}  // namespace

ThreadEntry* thread_entry() {
  const EntryMap& entries = entry_map(thread_part);
  if (entries.empty()) return nullptr;
  const auto found = entries.find(slot_key());
  return found == entries.end() || found->second == nullptr ? nullptr
                                                            : entry_behind(*found->second);
}

std::shared_ptr<ThreadEntry> share_thread_entry() {
  const EntryMap& entries = entry_map(thread_part);
  if (entries.empty()) return nullptr;
  const auto found = entries.find(slot_key());
  return found == entries.end() ? nullptr : entry_behind(found->second);
}

std::shared_ptr<ThreadEntry> exchange_thread_entry(std::shared_ptr<ThreadEntry> entry) {
  ThreadPart& part = thread_part;  // one look-up for all
  EntryMap& entries = entry_map(part);
  const auto found = entries.empty() ? entries.end() : entries.find(slot_key());
  if (found == entries.end()) {
    if (entry == nullptr) return nullptr;
    if (part.spare == nullptr || part.spare->node.empty()) {
      entries.emplace(slot_key(), handle_of(std::move(entry)));
    } else {
      part.spare->node.mapped() = handle_of(std::move(entry));
      entries.insert(std::move(part.spare->node));
    }
    return nullptr;
  }
  auto previous = entry_behind(std::move(found->second));
  if (entry != nullptr) {
    found->second = handle_of(std::move(entry));
  } else {
    auto node = entries.extract(found);
    if (part.spare != nullptr) part.spare->node = std::move(node);
  }
  return previous;
}

namespace {

using c10::impl::TorchDispatchModeTLS;
using Mode = c10::impl::PyObject_TorchDispatchMode;

/// Leaked, like the interpreter; one for all threads, since it knows nothing.
const std::shared_ptr<Mode>& our_mode() {
  static const auto* const mode = new std::shared_ptr<Mode>(
      std::make_shared<Mode>(reinterpret_cast<PyObject*>(interpreter()), interpreter()));
  return *mode;
}

bool is_mode_active() {
  for (int64_t i = TorchDispatchModeTLS::stack_len() - 1; i >= 0; --i)
    if (TorchDispatchModeTLS::get_stack_at(i) == our_mode()) return true;
  return false;
}

using Modes = c10::SmallVector<std::shared_ptr<Mode>, 4>;

void push_all(Modes& modes) {
  for (; !modes.empty(); modes.pop_back())
    TorchDispatchModeTLS::push_non_infra_mode_onto_stack(std::move(modes.back()));
}

/// Wherever it stands. Modes above it stay in their order; returns how many there are.
int64_t remove_mode() {
  Modes above;
  while (TorchDispatchModeTLS::stack_len() > 0) {
    auto top = TorchDispatchModeTLS::pop_stack();
    if (top == our_mode()) break;
    above.push_back(std::move(top));
  }
  const auto num_above = static_cast<int64_t>(above.size());
  push_all(above);
  return num_above;
}

/// Where it stood: who opened the modes above takes the topmost away when it closes.
void insert_mode(int64_t num_above) {
  Modes above;
  while (num_above-- > 0 && TorchDispatchModeTLS::stack_len() > 0)
    above.push_back(TorchDispatchModeTLS::pop_stack());
  TorchDispatchModeTLS::push_non_infra_mode_onto_stack(our_mode());
  push_all(above);
}

}  // namespace

bool is_handling_operator() { return is_handling; }

bool are_operators_seen() { return is_mode_active(); }

OperatorSight::OperatorSight() : is_first_(!is_mode_active()) {
  if (is_first_) TorchDispatchModeTLS::push_non_infra_mode_onto_stack(our_mode());
}

OperatorSight::~OperatorSight() {
  if (is_first_ && is_mode_active()) remove_mode();
}

OperatorsUnseen::OperatorsUnseen() : was_seen_(is_mode_active()) {
  if (was_seen_) num_above_ = remove_mode();
}

OperatorsUnseen::~OperatorsUnseen() {
  if (was_seen_) insert_mode(num_above_);
}

int64_t foreign_hook_depth() {
  return static_cast<int64_t>(at::SavedTensorDefaultHooks::get_tls_state().stack.size());
}

int64_t graph_task_id() { return torch::autograd::get_current_graph_task_id(); }

void at_end_of_graph_task(std::function<void()> closure) {
  Engine::get_default_engine().queue_callback(std::move(closure));
}

}  // namespace remat::seam
