// A call with the state of its modules, as a region.

#include <structmember.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "modules.h"

namespace remat::python {

namespace {

/// A function with the state of its modules: called once for the forward, then by recomputes. No
/// object for the cyclic collector: Note [The function's objects].
struct FunctionObject {
  PyObject_HEAD vectorcallfunc call;
  PyObject* function;
  ModuleState* state;
  bool has_run;
};

PyObject* function_call(PyObject* object, PyObject* const* arguments, std::size_t flags,
                        PyObject* names) {
  auto& self = *reinterpret_cast<FunctionObject*>(object);
  if (!self.has_run) {
    self.has_run = true;
    auto result = py::reinterpret_steal<py::object>(
        PyObject_Vectorcall(self.function, arguments, flags, names));
    if (!result) return nullptr;
    return returned([&] { return self.state->settle(), result.release().ptr(); });
  }
  return returned([&] {
    const ModuleState::Hold hold(*self.state);
    return in_python([&] { return PyObject_Vectorcall(self.function, arguments, flags, names); });
  });
}

void function_dealloc(PyObject* object) {
  auto& self = *reinterpret_cast<FunctionObject*>(object);
  delete self.state;
  Py_XDECREF(self.function);
  PyTypeObject* const type = Py_TYPE(object);
  PyObject_Free(object);
  Py_DECREF(type);
}

PyTypeObject* function_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(FunctionObject, call), READONLY, nullptr}, {}};
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(function_dealloc)},
                                {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_members, members},
                                {0, nullptr}};
  static PyType_Spec spec{
      "remat._remat.FunctionOfModules", static_cast<int>(sizeof(FunctionObject)), 0,
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  static auto* const type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type;
}

}  // namespace

PyObject* run_region_of_modules(const CheckpointOptions& options, const Call& call,
                                const std::vector<PyObject*>& modules) {
  return returned([&]() -> PyObject* {
    if (!opens_region(options)) {  // a region around it sees to the modules
      const ModulesWatched watched(modules);
      return run_region(options, call);
    }
    auto state = std::make_unique<ModuleState>(modules);
    state->note_members();
    const CheckpointOptions all = with_modules(options, *state);
    auto* const object = PyObject_New(FunctionObject, function_type());
    if (object == nullptr) return nullptr;
    object->call = function_call;
    object->function = new_reference(call.function);
    object->state = state.release();
    object->has_run = false;
    const auto owned = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(object));
    return run_region(all, {owned.ptr(), call.arguments, call.num_positional, call.names},
                      object->state);
  });
}

}  // namespace remat::python
