#pragma once
// Tensors in Python objects, and copies of built-in containers.

#include <ATen/core/Tensor.h>

#include <unordered_map>

#include "python.h"
#include "remat/binding.h"

namespace remat::python {

/// Returns the tensor in a Python object, or null if it is no tensor.
const at::Tensor* tensor_in(PyObject* object);

/// Calls `visitor` with each tensor in a function's result: itself, in tuples, lists, dictionaries,
/// and in the attributes of data classes.
void visit_tensors(PyObject* result, TensorVisitor visitor, int depth = 0);

/// Calls `visitor(key, value)` for each entry, borrowed; does nothing for an object that is no
/// dictionary.
template <class Visitor>
void visit_entries(PyObject* dictionary, Visitor&& visitor) {
  if (dictionary == nullptr || PyDict_Check(dictionary) == 0) return;
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(dictionary, &position, &key, &value) != 0) visitor(key, value);
}

/// Copies built-in containers in depth, and shares everything else. One that is there twice is
/// copied once.
class ContainerCopies {
 public:
  /// A new reference to the copy, or to the object itself if there is no container in it that can
  /// change. Throws python_error.
  PyObject* of(PyObject* object);

 private:
  /// `num_known`: references that containers have which are copied, or copies.
  PyObject* copied(PyObject* object, Py_ssize_t num_known);
  PyObject* copied_tuple(PyObject* tuple);
  /// Both return null with a Python error set, also if they are given null.
  PyObject* with_items(PyObject* copy);
  PyObject* with_values(PyObject* copy);
  PyObject* forget(PyObject* copy);

  std::unordered_map<PyObject*, PyObject*> all_;
};

}  // namespace remat::python
