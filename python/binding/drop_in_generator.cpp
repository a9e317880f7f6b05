// The substitute of the generator of torch.utils.checkpoint.

#include <memory>
#include <new>
#include <utility>

#include "drop_in.h"

namespace remat::python {

namespace {

struct RegionObject {
  PyObject_HEAD alignas(DropInRun) unsigned char storage[sizeof(DropInRun)];
  DropInRun& run() { return *std::launder(reinterpret_cast<DropInRun*>(storage)); }
};

PyObject* region_next(PyObject* self) {
  DropInRun& run = reinterpret_cast<RegionObject*>(self)->run();
  if (run.state == DropInRun::State::New) {
    if (!guarded([&] { return run.open(); })) return nullptr;
    Py_RETURN_NONE;
  }
  guarded([&] { return run.finish(), true; });
  return nullptr;  // without an error: the iteration is over
}

PyObject* region_throw(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  DropInRun& run = reinterpret_cast<RegionObject*>(self)->run();
  PyObject* error = count == 0 ? nullptr : arguments[count > 1 ? 1 : 0];
  py::object made;
  if (error != nullptr &&
      PyExceptionClass_Check(count > 1 && error == Py_None ? arguments[0] : error) != 0) {
    made = py::reinterpret_steal<py::object>(
        PyObject_CallNoArgs(error == Py_None ? arguments[0] : error));
    if (!made) return nullptr;
    error = made.ptr();
  }
  if (error == nullptr || PyExceptionInstance_Check(error) == 0) {
    PyErr_SetString(PyExc_TypeError,
                    "exceptions must be classes or instances deriving from BaseException");
    return nullptr;
  }
  bool is_suppressed = false;
  const bool is_left = guarded([&] {
    is_suppressed = run.abandon(py::reinterpret_borrow<py::object>(error));
    return true;
  });
  if (!is_left) return nullptr;
  if (is_suppressed)
    PyErr_SetString(
        PyExc_RuntimeError,
        "torch.utils.checkpoint: the forward context provided by context_fn suppressed an "
        "exception raised during the checkpointed forward. Cause: the forward has failed, so "
        "that there is nothing to return.");
  else
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  return nullptr;
}

PyObject* region_close(PyObject* self, PyObject*) {
  DropInRun& run = reinterpret_cast<RegionObject*>(self)->run();
  if (run.state == DropInRun::State::Open) {
    py::object error = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(PyExc_GeneratorExit));
    if (!guarded([&] { return run.abandon(error), true; })) return nullptr;
  }
  run.state = DropInRun::State::Over;
  Py_RETURN_NONE;
}

void region_dealloc(PyObject* self) {
  {
    const ErrorAside aside;
    PyObject* const closed = region_close(self, nullptr);
    if (closed == nullptr) PyErr_WriteUnraisable(self);
    Py_XDECREF(closed);
    reinterpret_cast<RegionObject*>(self)->run().~DropInRun();
  }
  PyTypeObject* const object_type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(object_type);
}

PyMethodDef region_methods[] = {
    {"throw", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(region_throw)),
     METH_FASTCALL, "Ends the region with the exception that its function has raised."},
    {"close", region_close, METH_NOARGS, "Ends the region as if its function had not returned."},
    {nullptr, nullptr, 0, nullptr}};

PyTypeObject* region_type() {
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(region_dealloc)},
      {Py_tp_iter, reinterpret_cast<void*>(PyObject_SelfIter)},
      {Py_tp_iternext, reinterpret_cast<void*>(region_next)},
      {Py_tp_methods, region_methods},
      {Py_tp_doc,
       const_cast<char*>("A region: `next` begins it, and once more ends it. One thread.")},
      {0, nullptr}};
  static PyType_Spec spec{"remat._remat.Region", static_cast<int>(sizeof(RegionObject)), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  static PyTypeObject* const type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type;
}

/// Replaces torch.utils.checkpoint._checkpoint_without_reentrant_generator.
PyObject* region(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* keywords) {
  return returned([&]() -> PyObject* {
    if (count < num_settings || is_for_upstream())
      return PyObject_Vectorcall(upstream().generator, arguments, static_cast<std::size_t>(count),
                                 keywords);
    auto* const object = PyObject_New(RegionObject, region_type());
    if (object == nullptr) return nullptr;
    DropInRun& run = *new (object->storage) DropInRun();
    auto owned = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(object));
    run.prepare(arguments,
                {arguments[0], arguments + num_settings, count - num_settings, keywords});
    return owned.release().ptr();
  });
}

}  // namespace

void add_generator(py::module_& module) { add_function(module, "_region", region); }

}  // namespace remat::python
