#include "lib/seam/python_interpreter.h"

#include <c10/core/TensorImpl.h>
#include <c10/core/impl/PyInterpreter.h>

#include <atomic>
#include <string>

#include "lib/seam/dispatch_mode.h"
#include "lib/seam/fake_interpreter.h"

namespace remat::seam {

namespace {

/// Forwards to Python's table. Signatures of several releases are listed side by side. Those that
/// do not match the base override nothing, and are not compiled, since this is a template.
template <class Base>
struct Forwarding final : Base {
  explicit Forwarding(const Base& python) : python_(python) {}
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
    if (is_our_mode_on_top()) return handle_operator(op, *stack);
    python_.dispatch(op, stack);
  }
  c10::intrusive_ptr<TensorImpl> detach(const TensorImpl* self) const {
    return is_our_mode_on_top() ? detached(self) : python_.detach(self);
  }
  std::string name() const { return python_.name(); }
  void incref(PyObject* object) const { python_.incref(object); }
  void decref(PyObject* object) const { python_.decref(object); }
  void decref(PyObject* object, bool of_tensor) const { python_.decref(object, of_tensor); }
#if __has_include(<c10/core/impl/PyObjectSlot.h>)
  bool try_incref(const c10::impl::PyObjectSlot& slot) const { return python_.try_incref(slot); }
#endif
  size_t refcnt(PyObject* object) const { return python_.refcnt(object); }
  void reportErrorCallback(PyObject* callback, c10::DispatchKey key) const {
    python_.reportErrorCallback(callback, key);
  }
  void python_op_registration_trampoline(const c10::OperatorHandle& op, c10::DispatchKey key,
                                         c10::DispatchKeySet keys, torch::jit::Stack* stack,
                                         bool with_keyset, bool with_op) const {
    python_.python_op_registration_trampoline(op, key, keys, stack, with_keyset, with_op);
  }
  void throw_abstract_impl_not_imported_error(std::string op, const char* module,
                                              const char* context) const {
    python_.throw_abstract_impl_not_imported_error(op, module, context);
  }
  void python_dispatcher(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack* stack) const {
    python_.python_dispatcher(op, keys, stack);
  }
  bool is_contiguous(const TensorImpl* self, at::MemoryFormat format) const {
    return python_.is_contiguous(self, format);
  }
  c10::SymBool sym_is_contiguous(const TensorImpl* self, at::MemoryFormat format) const {
    return python_.sym_is_contiguous(self, format);
  }
  bool is_strides_like(const TensorImpl* self, at::MemoryFormat format) const {
    return python_.is_strides_like(self, format);
  }
  bool is_non_overlapping_and_dense(const TensorImpl* self) const {
    return python_.is_non_overlapping_and_dense(self);
  }
  c10::Device device(const TensorImpl* self) const { return python_.device(self); }
  int64_t dim(const TensorImpl* self) const { return python_.dim(self); }
  c10::IntArrayRef strides(const TensorImpl* self) const { return python_.strides(self); }
  c10::IntArrayRef sizes(const TensorImpl* self) const { return python_.sizes(self); }
  c10::SymIntArrayRef sym_sizes(const TensorImpl* self) const { return python_.sym_sizes(self); }
  c10::Layout layout(const TensorImpl* self) const { return python_.layout(self); }
  int64_t numel(const TensorImpl* self) const { return python_.numel(self); }
  c10::SymInt sym_numel(const TensorImpl* self) const { return python_.sym_numel(self); }
  c10::SymIntArrayRef sym_strides(const TensorImpl* self) const {
    return python_.sym_strides(self);
  }
  c10::SymInt sym_storage_offset(const TensorImpl* self) const {
    return python_.sym_storage_offset(self);
  }
  void trace_gpu_event_creation(c10::DeviceType device, uintptr_t event) const {
    python_.trace_gpu_event_creation(device, event);
  }
  void trace_gpu_event_deletion(c10::DeviceType device, uintptr_t event) const {
    python_.trace_gpu_event_deletion(device, event);
  }
  void trace_gpu_event_record(c10::DeviceType device, uintptr_t event, uintptr_t stream) const {
    python_.trace_gpu_event_record(device, event, stream);
  }
  void trace_gpu_event_wait(c10::DeviceType device, uintptr_t event, uintptr_t stream) const {
    python_.trace_gpu_event_wait(device, event, stream);
  }
  void trace_gpu_memory_allocation(c10::DeviceType device, uintptr_t pointer) const {
    python_.trace_gpu_memory_allocation(device, pointer);
  }
  void trace_gpu_memory_deallocation(c10::DeviceType device, uintptr_t pointer) const {
    python_.trace_gpu_memory_deallocation(device, pointer);
  }
  void trace_gpu_stream_creation(c10::DeviceType device, uintptr_t stream) const {
    python_.trace_gpu_stream_creation(device, stream);
  }
  void trace_gpu_device_synchronization(c10::DeviceType device) const {
    python_.trace_gpu_device_synchronization(device);
  }
  void trace_gpu_stream_synchronization(c10::DeviceType device, uintptr_t stream) const {
    python_.trace_gpu_stream_synchronization(device, stream);
  }
  void trace_gpu_event_synchronization(c10::DeviceType device, uintptr_t event) const {
    python_.trace_gpu_event_synchronization(device, event);
  }
  void reset_backward_hooks(const TensorImpl* self) const { python_.reset_backward_hooks(self); }
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

 private:
  const Base& python_;
};

}  // namespace

// The table is leaked, like LibTorch's: tensors may outlive static destruction, before which
// LibTorch installs a table that does nothing.
void look_into(c10::impl::PyInterpreter& python) {
  using Table = c10::impl::PyInterpreterVTable;
  const Table* const forwarding = new Forwarding<Table>(*python.vtable_);
  std::atomic_ref(python.vtable_).store(forwarding, std::memory_order_release);
}

}  // namespace remat::seam
