#include "lib/seam/dispatch_mode.h"

#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>
#if __has_include(<c10/core/impl/PyInterpreterHooks.h>)
#include <c10/core/impl/PyInterpreterHooks.h>
#define REMAT_HAS_INTERPRETER_HOOKS 1
#endif

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "lib/seam/interpreter.h"
#include "remat/binding.h"

namespace remat::seam {

namespace {

OperatorHandler operator_handler = nullptr;
thread_local bool is_handling = false;

/// True if modes and tensors of Python may exist. Determined when operators are first seen, and
/// again by each next region, since a process may load Python later.
std::atomic<bool> may_have_python{true};

void look_for_python() {
#ifdef REMAT_HAS_INTERPRETER_HOOKS
  // Asking for the interpreter itself would fix the answer for the rest of the process.
  static const std::string key = "PyInterpreterHooks";
  may_have_python.store(c10::impl::PyInterpreterHooksRegistry()->Has(key),
                        std::memory_order_relaxed);
#endif
}

constexpr c10::DispatchKeySet mode_keys({c10::DispatchKey::Python,
                                         c10::DispatchKey::PythonTLSSnapshot});

bool is_looking_away() {
  return !may_have_python.load(std::memory_order_relaxed) &&
         c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python);
}

void look_away(bool away) {
  for (const c10::DispatchKey key : mode_keys) c10::impl::tls_set_dispatch_key_excluded(key, away);
}

using c10::impl::TorchDispatchModeTLS;
using Mode = c10::impl::PyObject_TorchDispatchMode;

/// Leaked, like the interpreter. All threads share it, since it has no state.
const std::shared_ptr<Mode>& mode_without_python() {
  static const auto* const mode = new std::shared_ptr<Mode>(
      std::make_shared<Mode>(reinterpret_cast<PyObject*>(interpreter()), interpreter()));
  return *mode;
}

/// See Note [A mode that is Python's]. Leaked, too.
struct PythonMode {
  std::shared_ptr<Mode> mode;
  PyObject* object;
  c10::impl::PyInterpreter* interpreter;
  std::once_flag is_looked_into;
};
std::atomic<PythonMode*> python_mode{nullptr};

const std::shared_ptr<Mode>& our_mode() {
  PythonMode* const python = python_mode.load(std::memory_order_acquire);
  return python == nullptr ? mode_without_python() : python->mode;
}

bool is_ours(const std::shared_ptr<Mode>& mode) {
  const PythonMode* const python = python_mode.load(std::memory_order_acquire);
  if (python == nullptr) return mode == mode_without_python();
  if (mode == python->mode) return true;
  // Python code that removed the mode for a while pushes a new reference to the object.
  return (&mode->pyinterpreter() == python->interpreter &&
          mode->ptr(python->interpreter) == python->object) ||
         mode == mode_without_python();
}

bool is_mode_active() {
  for (int64_t i = TorchDispatchModeTLS::stack_len() - 1; i >= 0; --i)
    if (is_ours(TorchDispatchModeTLS::get_stack_at(i))) return true;
  return false;
}

using Modes = c10::SmallVector<std::shared_ptr<Mode>, 4>;

void push_all(Modes& modes) {
  for (; !modes.empty(); modes.pop_back())
    TorchDispatchModeTLS::push_non_infra_mode_onto_stack(std::move(modes.back()));
}

/// Removes our mode from any position. Modes above it stay in order; returns how many there are.
int64_t remove_mode() {
  Modes above;
  while (TorchDispatchModeTLS::stack_len() > 0) {
    auto top = TorchDispatchModeTLS::pop_stack();
    if (is_ours(top)) break;
    above.push_back(std::move(top));
  }
  const auto num_above = static_cast<int64_t>(above.size());
  push_all(above);
  return num_above;
}

/// Inserts our mode at its old position, since a scope that opened a mode above removes the topmost
/// mode when it closes.
void insert_mode(int64_t num_above) {
  Modes above;
  while (num_above-- > 0 && TorchDispatchModeTLS::stack_len() > 0)
    above.push_back(TorchDispatchModeTLS::pop_stack());
  TorchDispatchModeTLS::push_non_infra_mode_onto_stack(our_mode());
  push_all(above);
}

/// Returns whether this thread has no other mode and the process no tensors of a Python class.
bool is_alone() {
  return !may_have_python.load(std::memory_order_relaxed) && TorchDispatchModeTLS::stack_len() == 1;
}

}  // namespace

void set_operator_handler(OperatorHandler handler) { operator_handler = handler; }

void handle_operator(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  struct Handling {
    bool& flag = is_handling;  // this thread's, looked up once
    const bool outer = std::exchange(flag, true);
    ~Handling() { flag = outer; }
  } handling;
  operator_handler(op, stack);
}

AtKernel::AtKernel(c10::DispatchKeySet met) : before_(c10::impl::tls_local_dispatch_key_set()) {
  c10::impl::LocalDispatchKeySet keys = before_;
  {
    const at::impl::RestorePythonTLSSnapshot on_entry;
    keys.excluded_ = c10::impl::tls_local_dispatch_key_set().excluded_ | met;
  }
  const bool alone = is_alone();
  if (alone) keys.excluded_ = keys.excluded_ | mode_keys;
  c10::impl::_force_tls_local_dispatch_key_set(keys);
  // It is the topmost mode, since LibTorch called it.
  if (!alone) mode_ = TorchDispatchModeTLS::pop_stack();
}

AtKernel::~AtKernel() {
  if (mode_ != nullptr) TorchDispatchModeTLS::push_non_infra_mode_onto_stack(std::move(mode_));
  c10::impl::_force_tls_local_dispatch_key_set(before_);
}

c10::DispatchKeySet keys_met(const c10::OperatorHandle& op) {
  c10::DispatchKeySet met = c10::autograd_dispatch_keyset;
  const auto add_if_met = [&](c10::DispatchKey key) {
    if (op.hasKernelForDispatchKey(key)) met = met.add(key);
  };
  // LibTorch's autograd kernels exclude it, too, except for operators that only write.
  const c10::FunctionSchema& schema = op.schema();
  const bool only_writes =
      schema.name().back() == '_' ||
      std::any_of(schema.arguments().begin(), schema.arguments().end(),
                  [](const c10::Argument& argument) { return argument.is_out(); });
  if (only_writes)
    add_if_met(c10::DispatchKey::ADInplaceOrView);
  else
    met = met.add(c10::DispatchKey::ADInplaceOrView);
  for (const c10::DispatchKey key : c10::autocast_dispatch_keyset) add_if_met(key);
  return met;
}

bool is_our_mode_on_top() {
  const int64_t num_modes = TorchDispatchModeTLS::stack_len();
  return num_modes > 0 && is_ours(TorchDispatchModeTLS::get_stack_at(num_modes - 1));
}

bool is_handling_operator() { return is_handling; }

bool is_dispatch_mode_on() { return is_mode_active() && !is_looking_away(); }

DispatchMode::DispatchMode() : is_first_(!is_mode_active()) {
  look_for_python();
  if (PythonMode* const python = python_mode.load(std::memory_order_acquire))
    std::call_once(python->is_looked_into, [&] { look_into(*python->interpreter); });
  was_away_ = is_looking_away();
  if (was_away_) look_away(false);
  if (is_first_) TorchDispatchModeTLS::push_non_infra_mode_onto_stack(our_mode());
}

DispatchMode::~DispatchMode() {
  if (is_first_ && is_mode_active()) remove_mode();
  if (was_away_) look_away(true);
}

DispatchModeOff::DispatchModeOff() : was_seen_(is_dispatch_mode_on()) {
  if (was_seen_) num_above_ = remove_mode();
}

DispatchModeOff::~DispatchModeOff() {
  if (was_seen_) insert_mode(num_above_);
}

}  // namespace remat::seam

namespace remat {

void set_dispatch_mode(PyObject* object, c10::impl::PyInterpreter* interpreter) {
  using seam::Mode;
  seam::python_mode.store(
      new seam::PythonMode{std::make_shared<Mode>(object, interpreter), object, interpreter, {}},
      std::memory_order_release);
}

}  // namespace remat
