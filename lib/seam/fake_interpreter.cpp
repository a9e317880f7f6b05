#include "lib/seam/fake_interpreter.h"

#include <c10/core/SafePyObject.h>
#include <c10/core/TensorImpl.h>

#if __has_include(<c10/core/impl/PyInterpreterHooks.h>)
#include <c10/core/impl/PyInterpreterHooks.h>
#define REMAT_HAS_GLOBAL_INTERPRETER 1
#else
#define REMAT_HAS_GLOBAL_INTERPRETER 0
#endif

#include <string>
#include <tuple>

#include "lib/seam/dispatch_mode.h"

namespace remat::seam {

namespace {

/// LibTorch calls only incref and decref for our entries, which count their owners themselves. For
/// our mode it calls `dispatch`, and `detach`, where null means the plain copy. Signatures of
/// several releases are listed side by side; the one that matches the base overrides it, so none is
/// marked `override`.
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
  c10::intrusive_ptr<TensorImpl> detach(const TensorImpl* self) const { return detached(self); }
  void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) const {
    handle_operator(op, *stack);
  }
  void reportErrorCallback(PyObject*, c10::DispatchKey) const { refuse(); }
  /// Called for an operator whose kernel is a Python function: LibTorch runs it through the
  /// interpreter of the mode on top.
  void python_op_registration_trampoline(const c10::OperatorHandle& op, c10::DispatchKey key,
                                         c10::DispatchKeySet keys, torch::jit::Stack* stack,
                                         bool with_keyset, bool with_op) const {
#if REMAT_HAS_GLOBAL_INTERPRETER
    if (c10::impl::PyInterpreter* const python = c10::impl::getGlobalPyInterpreter())
      return (*python)->python_op_registration_trampoline(op, key, keys, stack, with_keyset,
                                                          with_op);
#else
    static_cast<void>(std::tie(op, key, keys, stack, with_keyset, with_op));
#endif
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

}  // namespace

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

c10::impl::PyInterpreter* interpreter() {
  static auto* const vtable = new Interpreter;
  static auto* const tag = new c10::impl::PyInterpreter(vtable);
  return tag;
}

}  // namespace remat::seam
