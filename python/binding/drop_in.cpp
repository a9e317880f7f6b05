// What stands in for the generator of torch.utils.checkpoint: its regions run here.

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/forward_grad.h>

#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "policy.h"
#include "python.h"
#include "region.h"
#include "remat/binding.h"

namespace remat::python {

namespace {

/// What the drop-in needs of torch.utils.checkpoint; never freed.
struct Upstream {
  PyObject* generator = nullptr;  ///< the function that is stood in for
  PyObject* globals = nullptr;    ///< its module's dictionary, read at each call as it does
  PyObject* noop_context_fn = nullptr;
  PyObject* default_metadata = nullptr;  ///< its own function for determinism_check="default"
  PyObject* no_metadata = nullptr;       ///< ... for "none"
  PyObject* is_tracing =
      nullptr;  ///< whether the call is torch.compile's, asked under a dispatch mode
  PyObject* contexts = nullptr;  ///< (policy, forward context, recompute context) of a context_fn
  PyObject* debug_contexts = nullptr;  ///< (forward context, recompute context, on_error)
  PyObject* fingerprint = nullptr;     ///< the text that a metadata function gives of a tensor
  PyObject* leave = nullptr;  ///< leaves a context; whether it has suppressed the exception
  bool is_on = false;
};
Upstream& upstream() {
  static Upstream all;
  return all;
}

PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }

/// A value of a dictionary, borrowed; null if there is none.
PyObject* value_of(PyObject* dictionary, PyObject* key) {
  return PyDict_GetItemWithError(dictionary, key);
}

bool is_true(PyObject* value) {
  const int is = PyObject_IsTrue(value);
  if (is < 0) throw python_error();
  return is != 0;
}

/// Compiled autograd traces the hooks of upstream's regions, which ours are not.
bool is_compiled_autograd_on() {
  static PyObject* const modules = PyImport_GetModuleDict();
  static PyObject* const name = interned("torch._dynamo.compiled_autograd");
  static PyObject* const flag = interned("compiled_autograd_enabled");
  PyObject* const module = value_of(modules, name);
  if (module == nullptr) return false;
  return value_of(PyModule_GetDict(module), flag) == Py_True;
}

/// Forward-mode AD and functorch's transforms: what upstream makes of them, if not much, regions refuse.
bool is_transformed() {
  return c10::impl::tls_is_dispatch_key_included(
             c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

/// Calls that are upstream's own affair.
bool is_for_upstream() {
  if (!upstream().is_on || is_compiled_autograd_on() || is_transformed()) return true;
  if (!c10::impl::TorchDispatchModeTLS::any_modes_set()) return false;
  const py::object result = py::reinterpret_steal<py::object>(
      in_python([] { return PyObject_CallNoArgs(upstream().is_tracing); }));
  if (!result) throw python_error();
  return result.ptr() == Py_True;
}

// ---- the stand-in for a generator --------------------------------------------------------------------

/// See Note [Tensors held twice].
struct Forward {
  Forward(const CheckpointOptions& options, std::unique_ptr<Body> body, const FunctionFacts& facts)
      : held(body->inputs()), run(options, std::move(body), facts) {}
  const HeldTensors held;
  ForwardRun run;
};

/// A region between two calls of `next`. One thread.
struct Run {
  enum class State { New, Open, Plain, Over };
  State state = State::New;
  CheckpointOptions options;
  std::unique_ptr<Body> body;      // until the region opens
  py::object forward_context;      // null for none
  std::optional<Forward> forward;  // while it is open

  /// False: a recompute around ends here, with the Python error that is set.
  bool open();
  void finish();
  /// Whether the forward context has suppressed the exception; null: it has ended as it should.
  bool leave_context(py::handle error);
};

bool Run::open() {
  if (!opens_region()) {
    state = State::Plain;
    body.reset();
    return true;
  }
  forward.emplace(options, std::move(body), FunctionFacts{.always_stops = true, .sees_end = true});
  if (forward->run.has_ended()) {
    forward.reset();
    state = State::Over;
    return false;
  }
  state = State::Open;
  if (!forward_context) return true;
  try {
    call_python(py::type::of(forward_context).attr("__enter__"), forward_context);
  } catch (...) {
    forward_context = py::object();
    forward.reset();
    state = State::Over;
    throw;
  }
  return true;
}

bool Run::leave_context(py::handle error) {
  if (!forward_context) return false;
  const py::object context = std::exchange(forward_context, py::object());
  const py::object result =
      call_python(upstream().leave, context, error ? error : py::handle(Py_None));
  return result.ptr() == Py_True;
}

void Run::finish() {
  const State before = std::exchange(state, State::Over);
  if (before != State::Open) return;
  leave_context({});
  forward->run.finish([](TensorVisitor) {});
  forward.reset();
}

struct RegionObject {
  PyObject_HEAD alignas(Run) unsigned char storage[sizeof(Run)];
  Run& run() { return *std::launder(reinterpret_cast<Run*>(storage)); }
};

/// Calls `action`, with warnings of the library going to Python; false if there is a Python error.
template <class Action>
bool guarded(Action&& action) {
  try {
    torch::PyWarningHandler warnings;
    try {
      if (action()) return true;
      warnings.set_in_exception();
    } catch (...) {
      warnings.set_in_exception();
      set_error_in_flight();
    }
    return false;
  } catch (...) {
    set_error_in_flight();
    return false;
  }
}

PyObject* region_next(PyObject* self) {
  Run& run = reinterpret_cast<RegionObject*>(self)->run();
  if (run.state == Run::State::New) {
    if (!guarded([&] { return run.open(); })) return nullptr;
    Py_RETURN_NONE;
  }
  guarded([&] { return run.finish(), true; });
  return nullptr;  // without an error: the iteration is over
}

PyObject* region_throw(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  Run& run = reinterpret_cast<RegionObject*>(self)->run();
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
    run.state = Run::State::Over;
    const py::object kept = py::reinterpret_borrow<py::object>(error);
    struct Closed {
      ~Closed() { run.forward.reset(); }
      Run& run;
    } const closed{run};
    is_suppressed = run.leave_context(kept);
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
  Run& run = reinterpret_cast<RegionObject*>(self)->run();
  if (run.state == Run::State::Open) {
    py::object error = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(PyExc_GeneratorExit));
    if (!guarded([&] {
          run.state = Run::State::Over;
          struct Closed {
            ~Closed() { run.forward.reset(); }
            Run& run;
          } const closed{run};
          run.leave_context(error);
          return true;
        }))
      return nullptr;
  }
  run.state = Run::State::Over;
  Py_RETURN_NONE;
}

void region_dealloc(PyObject* self) {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyObject* const closed = region_close(self, nullptr);
  if (closed == nullptr) PyErr_WriteUnraisable(self);
  Py_XDECREF(closed);
  reinterpret_cast<RegionObject*>(self)->run().~Run();
  PyErr_Restore(type, value, traceback);
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

// ---- the arguments of upstream's generator -------------------------------------------------------------

/// What upstream has of a region before its function: function, preserve_rng_state, context_fn,
/// determinism_check, debug, early_stop.
constexpr Py_ssize_t num_settings = 6;

void set_determinism_check(CheckpointOptions& options, PyObject* check) {
  static PyObject* const table_name = interned("_allowed_determinism_checks_to_fns");
  PyObject* const table = value_of(upstream().globals, table_name);
  PyObject* const function = table == nullptr ? nullptr : PyDict_GetItemWithError(table, check);
  if (function == upstream().default_metadata) {
    options.determinism_check = DeterminismCheck::Metadata;
  } else if (function == upstream().no_metadata) {
    options.determinism_check = DeterminismCheck::None;
  } else if (function == nullptr) {
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    const py::object known = py::reinterpret_steal<py::object>(PyDict_Keys(table));
    PyErr_Format(PyExc_ValueError, "determinism_check should be one of %S, but got %S", known.ptr(),
                 check);
    throw py::error_already_set();
  } else {  // one that the program has added
    const std::shared_ptr<PyObject> kept(function, [](PyObject* last) { drop(&last, 1); });
    Py_INCREF(function);
    options.fingerprint = [kept](const at::Tensor& tensor) {
      const Locked locked(Locked::AtEnd::Wait);
      try {
        return call_python(upstream().fingerprint, py::handle(kept.get()), tensor)
            .cast<std::string>();
      } catch (py::error_already_set& error) {
        error.restore();
      }
      throw_persisted();
    };
  }
}

void prepare(Run& run, PyObject* const* arguments, Py_ssize_t count, PyObject* keywords) {
  static PyObject* const debug_name = interned("_checkpoint_debug_enabled");
  static PyObject* const early_stop_name = interned("_enable_checkpoint_early_stop");
  const Upstream& torch = upstream();
  CheckpointOptions& options = run.options;
  options.preserve_rng_state = is_true(arguments[1]);
  PyObject* const context_fn = arguments[2];
  PyObject* const debug = value_of(torch.globals, debug_name);
  PyObject* const early_stop = value_of(torch.globals, early_stop_name);
  options.early_stop =
      is_true(early_stop == nullptr || early_stop == Py_None ? arguments[5] : early_stop);
  options.capture_check = CaptureCheck::Ignore;
  options.strict_unpack = true;
  options.buffers = BufferPolicy::Ignore;
  py::object recompute_context, on_error;
  if (is_true(debug == nullptr || debug == Py_None ? arguments[4] : debug)) {
    if (context_fn != torch.noop_context_fn) {
      PyErr_SetString(PyExc_ValueError, "debug=True is incompatible with non-default context_fn");
      throw py::error_already_set();
    }
    set_determinism_check(options, arguments[3]);
    const py::tuple found = call_python(torch.debug_contexts);
    run.forward_context = found[0];
    recompute_context = found[1];
    on_error = found[2];
  } else {
    set_determinism_check(options, arguments[3]);
    if (context_fn != torch.noop_context_fn) {
      const py::tuple found = call_python(torch.contexts, py::handle(context_fn));
      if (!found[0].is_none()) options.policy = policy_in(found[0].ptr());
      if (!found[1].is_none()) run.forward_context = found[1];
      if (!found[2].is_none()) recompute_context = found[2];
    }
  }
  if (!c10::GradMode::is_enabled()) return;
  const Call call{arguments[0], arguments + num_settings, count - num_settings, keywords};
  run.body = std::make_unique<Body>(call, InputArguments::Positional);
  run.body->set_contexts(recompute_context.ptr(), on_error.ptr());
}

/// Stands in for torch.utils.checkpoint._checkpoint_without_reentrant_generator.
PyObject* region(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* keywords) {
  try {
    if (count < num_settings || is_for_upstream())
      return PyObject_Vectorcall(upstream().generator, arguments, static_cast<std::size_t>(count),
                                 keywords);
    auto* const object = PyObject_New(RegionObject, region_type());
    if (object == nullptr) return nullptr;
    Run& run = *new (object->storage) Run();
    const auto owned = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(object));
    prepare(run, arguments, count, keywords);
    return py::object(owned).release().ptr();
  } catch (...) {
    set_error_in_flight();
    return nullptr;
  }
}

PyMethodDef region_method{"region",
                          reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(region)),
                          METH_FASTCALL | METH_KEYWORDS, nullptr};

}  // namespace

void add_drop_in(py::module_& module) {
  module.attr("_region") =
      py::reinterpret_steal<py::object>(PyCFunction_NewEx(&region_method, nullptr, nullptr));
  module.def("_set_upstream", [](const py::dict& all) {
    const auto take = [&](const char* name) { return py::object(all[name]).release().ptr(); };
    Upstream& torch = upstream();
    torch.generator = take("generator");
    torch.globals = take("globals");
    torch.noop_context_fn = take("noop_context_fn");
    torch.default_metadata = take("default_metadata");
    torch.no_metadata = take("no_metadata");
    torch.is_tracing = take("is_tracing");
    torch.contexts = take("contexts");
    torch.debug_contexts = take("debug_contexts");
    torch.fingerprint = take("fingerprint");
    torch.leave = take("leave");
  });
  module.def("_turn_drop_in", [](bool on) { upstream().is_on = on; });
}

}  // namespace remat::python
