#include "lib/seam/interpreter.h"

#include <c10/core/SafePyObject.h>
#include <c10/core/TensorImpl.h>

#if __has_include(<c10/core/impl/PyInterpreterHooks.h>)
#include <c10/core/impl/PyInterpreterHooks.h>
#define REMAT_HAS_GLOBAL_INTERPRETER 1
#else
#define REMAT_HAS_GLOBAL_INTERPRETER 0
#endif

#include <atomic>
#include <string>

#include "lib/seam/dispatch_mode.h"

namespace remat::seam {

namespace {

/// Returns the result of an interpreter's `detach` while our mode is the topmost: null for the
/// plain copy.
c10::intrusive_ptr<c10::TensorImpl> detached(const c10::TensorImpl* tensor) {
  if (tensor->layout() == c10::kStrided &&
      !tensor->key_set().has_any(
          c10::DispatchKeySet{c10::DispatchKey::NestedTensor, c10::DispatchKey::Python}))
    return {};
  // Only dense tensors have a plain copy to fall back to; a tensor of a Python class would lose the
  // tensor that it wraps.
  const DispatchModeOff unseen;
  return tensor->shallow_copy_and_detach(tensor->version_counter(),
                                         tensor->allow_tensor_metadata_change());
}

/// The functions of an interpreter: those of Python's table, or of our own interpreter if there is
/// none. LibTorch calls only incref and decref for our entries, which count their owners
/// themselves, and dispatch and detach for our mode. Signatures of several releases are listed side
/// by side. Those that do not match the base override nothing, and are not compiled, since this is
/// a template.
template <class Base>
struct Table final : Base {
  explicit Table(const Base* python) : python_(python) {}
  using TensorImpl = c10::TensorImpl;
#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsuggest-override"
#if defined(__clang__)
#pragma GCC diagnostic ignored "-Winconsistent-missing-override"
#pragma GCC diagnostic ignored "-Woverloaded-virtual"
#endif
#endif
  void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) const {
    if (sees_operators()) return handle_operator(op, *stack);
    python_->dispatch(op, stack);
  }
  c10::intrusive_ptr<TensorImpl> detach(const TensorImpl* self) const {
    return sees_operators() ? detached(self) : python_->detach(self);
  }
  std::string name() const { return python_ == nullptr ? "remat" : python_->name(); }
  void incref(PyObject* object) const {
    if (python_ != nullptr) python_->incref(object);
  }
  void decref(PyObject* object) const {
    if (python_ != nullptr) python_->decref(object);
  }
  void decref(PyObject* object, bool of_tensor) const {
    if (python_ != nullptr) python_->decref(object, of_tensor);
  }
#if __has_include(<c10/core/impl/PyObjectSlot.h>)
  bool try_incref(const c10::impl::PyObjectSlot& slot) const {
    return python_ == nullptr || python_->try_incref(slot);
  }
#endif
  size_t refcnt(PyObject* object) const { return python_ == nullptr ? 1 : python_->refcnt(object); }
  void reportErrorCallback(PyObject* callback, c10::DispatchKey key) const {
    python().reportErrorCallback(callback, key);
  }
  /// Called for an operator whose kernel is a Python function: LibTorch runs it through the
  /// interpreter of the mode on top.
  void python_op_registration_trampoline(const c10::OperatorHandle& op, c10::DispatchKey key,
                                         c10::DispatchKeySet keys, torch::jit::Stack* stack,
                                         bool with_keyset, bool with_op) const {
#if REMAT_HAS_GLOBAL_INTERPRETER
    if (c10::impl::PyInterpreter* const global =
            python_ == nullptr ? c10::impl::getGlobalPyInterpreter() : nullptr)
      return (*global)->python_op_registration_trampoline(op, key, keys, stack, with_keyset,
                                                          with_op);
#endif
    python().python_op_registration_trampoline(op, key, keys, stack, with_keyset, with_op);
  }
  void throw_abstract_impl_not_imported_error(std::string op, const char* module,
                                              const char* context) const {
    python().throw_abstract_impl_not_imported_error(op, module, context);
  }
  void python_dispatcher(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack* stack) const {
    python().python_dispatcher(op, keys, stack);
  }
  bool is_contiguous(const TensorImpl* self, at::MemoryFormat format) const {
    return python().is_contiguous(self, format);
  }
  c10::SymBool sym_is_contiguous(const TensorImpl* self, at::MemoryFormat format) const {
    return python().sym_is_contiguous(self, format);
  }
  bool is_strides_like(const TensorImpl* self, at::MemoryFormat format) const {
    return python().is_strides_like(self, format);
  }
  bool is_non_overlapping_and_dense(const TensorImpl* self) const {
    return python().is_non_overlapping_and_dense(self);
  }
  c10::Device device(const TensorImpl* self) const { return python().device(self); }
  int64_t dim(const TensorImpl* self) const { return python().dim(self); }
  c10::IntArrayRef strides(const TensorImpl* self) const { return python().strides(self); }
  c10::IntArrayRef sizes(const TensorImpl* self) const { return python().sizes(self); }
  c10::SymIntArrayRef sym_sizes(const TensorImpl* self) const { return python().sym_sizes(self); }
  c10::Layout layout(const TensorImpl* self) const { return python().layout(self); }
  int64_t numel(const TensorImpl* self) const { return python().numel(self); }
  c10::SymInt sym_numel(const TensorImpl* self) const { return python().sym_numel(self); }
  c10::SymIntArrayRef sym_strides(const TensorImpl* self) const {
    return python().sym_strides(self);
  }
  c10::SymInt sym_storage_offset(const TensorImpl* self) const {
    return python().sym_storage_offset(self);
  }
  void trace_gpu_event_creation(c10::DeviceType device, uintptr_t event) const {
    if (python_ != nullptr) python_->trace_gpu_event_creation(device, event);
  }
  void trace_gpu_event_deletion(c10::DeviceType device, uintptr_t event) const {
    if (python_ != nullptr) python_->trace_gpu_event_deletion(device, event);
  }
  void trace_gpu_event_record(c10::DeviceType device, uintptr_t event, uintptr_t stream) const {
    if (python_ != nullptr) python_->trace_gpu_event_record(device, event, stream);
  }
  void trace_gpu_event_wait(c10::DeviceType device, uintptr_t event, uintptr_t stream) const {
    if (python_ != nullptr) python_->trace_gpu_event_wait(device, event, stream);
  }
  void trace_gpu_memory_allocation(c10::DeviceType device, uintptr_t pointer) const {
    if (python_ != nullptr) python_->trace_gpu_memory_allocation(device, pointer);
  }
  void trace_gpu_memory_deallocation(c10::DeviceType device, uintptr_t pointer) const {
    if (python_ != nullptr) python_->trace_gpu_memory_deallocation(device, pointer);
  }
  void trace_gpu_stream_creation(c10::DeviceType device, uintptr_t stream) const {
    if (python_ != nullptr) python_->trace_gpu_stream_creation(device, stream);
  }
  void trace_gpu_device_synchronization(c10::DeviceType device) const {
    if (python_ != nullptr) python_->trace_gpu_device_synchronization(device);
  }
  void trace_gpu_stream_synchronization(c10::DeviceType device, uintptr_t stream) const {
    if (python_ != nullptr) python_->trace_gpu_stream_synchronization(device, stream);
  }
  void trace_gpu_event_synchronization(c10::DeviceType device, uintptr_t event) const {
    if (python_ != nullptr) python_->trace_gpu_event_synchronization(device, event);
  }
  void reset_backward_hooks(const TensorImpl* self) const {
    if (python_ != nullptr) python_->reset_backward_hooks(self);
  }
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

 private:
  bool sees_operators() const { return python_ == nullptr || is_our_mode_on_top(); }
  const Base& python() const {
    TORCH_CHECK(python_ != nullptr, "remat: LibTorch called an interpreter that only holds scopes");
    return *python_;
  }
  const Base* const python_;
};

using PythonTable = Table<c10::impl::PyInterpreterVTable>;

}  // namespace

c10::impl::PyInterpreter* interpreter() {
  static auto* const tag = new c10::impl::PyInterpreter(new PythonTable(nullptr));
  return tag;
}

// The table is leaked, like LibTorch's: tensors may outlive static destruction, before which
// LibTorch installs a table that does nothing.
void look_into(c10::impl::PyInterpreter& python) {
  const c10::impl::PyInterpreterVTable* const forwarding = new PythonTable(python.vtable_);
  std::atomic_ref(python.vtable_).store(forwarding, std::memory_order_release);
}

}  // namespace remat::seam
