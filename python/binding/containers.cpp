// Tensors in Python objects, and copies of built-in containers.

#include "containers.h"

#include <torch/csrc/autograd/python_variable.h>

namespace remat::python {

const at::Tensor* tensor_in(PyObject* object) {
  if (!THPVariable_CheckTypeExact(Py_TYPE(object)) &&
      PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(THPVariableClass)) == 0)
    return nullptr;
  const at::Tensor& tensor = THPVariable_Unpack(object);
  return tensor.defined() ? &tensor : nullptr;
}

void visit_tensors(PyObject* result, TensorVisitor visitor, int depth) {
  if (const at::Tensor* const tensor = tensor_in(result)) {
    visitor(const_cast<at::Tensor&>(*tensor));  // visitors of results change none
    return;
  }
  if (result == Py_None || depth == 16) return;
  if (PyTuple_Check(result)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(result); ++i)
      visit_tensors(PyTuple_GET_ITEM(result, i), visitor, depth + 1);
  } else if (PyList_Check(result)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(result); ++i)
      visit_tensors(PyList_GET_ITEM(result, i), visitor, depth + 1);
  } else if (PyDict_Check(result)) {
    visit_entries(result,
                  [&](PyObject*, PyObject* value) { visit_tensors(value, visitor, depth + 1); });
  } else {  // past the interpreter: nothing of the program's runs
    static PyObject* const fields = PyUnicode_InternFromString("__dataclass_fields__");
    if (_PyType_Lookup(Py_TYPE(result), fields) == nullptr) return;
    PyObject** const attributes = _PyObject_GetDictPtr(result);  // null: one with slots
    if (attributes != nullptr && *attributes != nullptr)
      visit_tensors(*attributes, visitor, depth + 1);
  }
}

namespace {

PyTypeObject* type_of_collections(const char* name) {
  return reinterpret_cast<PyTypeObject*>(imported("collections", name));
}

}  // namespace

PyObject* ContainerCopies::of(PyObject* object) {
  PyObject* const copy = copied(object, 0);
  if (copy == nullptr) throw python_error();
  return copy;
}

PyObject* ContainerCopies::copied(PyObject* object, Py_ssize_t num_known) {
  if (tensor_in(object) != nullptr) return new_reference(object);
  static PyTypeObject* const ordered = type_of_collections("OrderedDict");
  static PyTypeObject* const with_default = type_of_collections("defaultdict");
  static PyTypeObject* const deque = type_of_collections("deque");
  const PyTypeObject* const type = Py_TYPE(object);
  const bool is_tuple = type == &PyTuple_Type, is_list = type == &PyList_Type,
             is_set = type == &PySet_Type, is_plain_dictionary = type == &PyDict_Type;
  if (!is_tuple && !is_list && !is_set && !is_plain_dictionary && type != ordered &&
      type != with_default && type != deque)
    return new_reference(object);
  const bool is_shared = Py_REFCNT(object) > num_known;  // else this is the only way to it
  if (is_shared)
    if (const auto found = all_.find(object); found != all_.end())
      return new_reference(found->second);
  const auto noted = [&](PyObject* copy) {
    if (is_shared && copy != nullptr) all_.emplace(object, copy);
    return copy;
  };
  if (is_tuple) return noted(copied_tuple(object));
  if (is_list) return with_items(noted(PyList_GetSlice(object, 0, PyList_GET_SIZE(object))));
  if (is_set) return noted(PySet_New(object));
  if (is_plain_dictionary) return with_values(noted(PyDict_Copy(object)));
  PyObject* const copy = in_python([&] { return PyObject_CallMethod(object, "copy", nullptr); });
  return type == deque ? noted(copy) : with_values(noted(copy));
}

PyObject* ContainerCopies::copied_tuple(PyObject* tuple) {
  PyObject* copy = nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    PyObject* const item = PyTuple_GET_ITEM(tuple, i);
    PyObject* const item_copy = copied(item, copy == nullptr ? 1 : 2);
    if (item_copy == item) {
      Py_DECREF(item_copy);
      continue;
    }
    if (item_copy != nullptr && copy == nullptr) {
      copy = PyTuple_New(PyTuple_GET_SIZE(tuple));
      for (Py_ssize_t j = 0; copy != nullptr && j < PyTuple_GET_SIZE(tuple); ++j)
        PyTuple_SET_ITEM(copy, j, new_reference(PyTuple_GET_ITEM(tuple, j)));
    }
    if (item_copy == nullptr || copy == nullptr) {
      Py_XDECREF(item_copy);
      Py_XDECREF(copy);
      return nullptr;
    }
    Py_DECREF(item);  // which the tuple that is copied still has
    PyTuple_SET_ITEM(copy, i, item_copy);
  }
  return copy == nullptr ? new_reference(tuple) : copy;
}

PyObject* ContainerCopies::with_items(PyObject* copy) {
  for (Py_ssize_t i = 0; copy != nullptr && i < PyList_GET_SIZE(copy); ++i) {
    PyObject* const item_copy = copied(PyList_GET_ITEM(copy, i), 2);
    if (item_copy == nullptr) return forget(copy);
    PyList_SetItem(copy, i, item_copy);
  }
  return copy;
}

PyObject* ContainerCopies::with_values(PyObject* copy) {
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  while (copy != nullptr && PyDict_Next(copy, &position, &key, &value) != 0) {
    PyObject* const value_copy = copied(value, 2);
    if (value_copy == nullptr) return forget(copy);
    // The key is there: the dictionary keeps its size and order.
    const int failed = value_copy == value ? 0 : PyDict_SetItem(copy, key, value_copy);
    Py_DECREF(value_copy);
    if (failed != 0) return forget(copy);
  }
  return copy;
}

PyObject* ContainerCopies::forget(PyObject* copy) {
  all_.clear();
  Py_DECREF(copy);
  return nullptr;
}

}  // namespace remat::python
