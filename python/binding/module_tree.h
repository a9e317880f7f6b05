#pragma once
// Trees of Python modules: what the binding asks of one.

#include "python.h"

namespace remat::python {

constexpr int deepest_module = 200;  // a tree with a cycle ends somewhere

inline PyObject* new_reference(PyObject* object) {
  Py_XINCREF(object);
  return object;
}

/// Returns an object of a module of Python, as a new reference.
PyObject* imported(const char* module, const char* name);
/// Returns whether the object is a torch.nn.Module.
bool is_module(PyObject* object);
/// Returns an entry of a dictionary, borrowed; null if there is none.
inline PyObject* entry(PyObject* dictionary, const char* name) {
  return PyDict_GetItemString(dictionary, name);
}

}  // namespace remat::python
