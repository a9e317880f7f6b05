#pragma once
// The Python object of a tensor, in a class of its own, as each release of torch has it.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include "python.h"

namespace remat::python {

template <class Slot>
bool has_object(Slot& slot) {
  if constexpr (requires { slot.load_pyobj(); })
    return slot.load_pyobj() != nullptr;
  else if constexpr (requires { slot.has_pyobj_nonhermetic(); })
    return slot.has_pyobj_nonhermetic();
  else
    return slot.check_pyobj(true).value_or(nullptr) != nullptr;  // 2.9
}

/// A new object of the class for a tensor that has none; null with an exception set. Before 2.10
/// torch makes them of its own class, and the object takes another as in Python:
/// `object.__class__ = type`.
template <class Tensor>
PyObject* object_of_class(const Tensor& tensor, PyObject* type) {
  auto* const as_type = reinterpret_cast<PyTypeObject*>(type);
  if constexpr (requires { THPVariable_Wrap(tensor, as_type); }) {
    return THPVariable_Wrap(tensor, as_type);
  } else {
    PyObject* const object = THPVariable_Wrap(tensor);
    if (object == nullptr) return nullptr;
    const auto disabled = py::module_::import("torch._C").attr("_disabled_torch_dispatch_impl");
    const auto dispatches = py::getattr(type, "__torch_dispatch__", disabled);
    if (PyObject_SetAttrString(object, "__class__", type) != 0) {
      Py_DECREF(object);
      return nullptr;
    }
    if (!dispatches.is(disabled)) tensor.unsafeGetTensorImpl()->set_python_dispatch(true);
    return object;
  }
}

}  // namespace remat::python
