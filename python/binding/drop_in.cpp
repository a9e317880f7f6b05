// Regions of torch.utils.checkpoint, with upstream's arguments, globals and contexts.

#include "drop_in.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/forward_grad.h>

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "policy.h"

namespace remat::python {

Upstream& upstream() {
  static Upstream all;
  return all;
}

namespace {

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

/// Returns whether forward-mode AD or functorch's transforms are active: upstream supports them in
/// part, and regions refuse them.
bool is_transformed() {
  return c10::impl::tls_is_dispatch_key_included(
             c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

}  // namespace

static std::array<int64_t, num_ways> counts{};

void count_call(Way way) { ++counts[static_cast<std::size_t>(way)]; }

Way way_of_call() {
  if (is_compiled_autograd_on()) return Way::CompiledAutograd;
  if (is_transformed()) return Way::Transform;
  if (!c10::impl::TorchDispatchModeTLS::any_modes_set()) return Way::Region;
  const py::object result = py::reinterpret_steal<py::object>(
      in_python([] { return PyObject_CallNoArgs(upstream().is_tracing); }));
  if (!result) throw python_error();
  return result.ptr() == Py_True ? Way::Tracing : Way::Region;
}

bool is_for_upstream() {
  if (!upstream().is_on) return true;
  const Way way = way_of_call();
  count_call(way);
  return way != Way::Region;
}

// ---- a region

bool DropInRun::open() {
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

bool DropInRun::leave_context(py::handle error) {
  if (!forward_context) return false;
  const py::object context = std::exchange(forward_context, py::object());
  const py::object result =
      call_python(upstream().leave, context, error ? error : py::handle(Py_None));
  return result.ptr() == Py_True;
}

bool DropInRun::abandon(py::handle error) {
  state = State::Over;
  struct Closed {
    ~Closed() { run.forward.reset(); }
    DropInRun& run;
  } const closed{*this};
  return leave_context(error);
}

void DropInRun::finish() {
  const State before = std::exchange(state, State::Over);
  if (before != State::Open) return;
  leave_context({});
  forward->run.finish([](TensorVisitor) {});
  forward.reset();
}

namespace {

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
    options.fingerprint = [kept = shared(function)](const at::Tensor& tensor) {
      return call_locked([&] {
        return call_python(upstream().fingerprint, py::handle(kept.get()), tensor)
            .cast<std::string>();
      });
    };
  }
}

}  // namespace

void DropInRun::prepare(PyObject* const* settings, const Call& call) {
  static PyObject* const debug_name = interned("_checkpoint_debug_enabled");
  static PyObject* const early_stop_name = interned("_enable_checkpoint_early_stop");
  const Upstream& torch = upstream();
  options.preserve_rng_state = is_true(settings[1]);
  PyObject* const context_fn = settings[2];
  PyObject* const debug = value_of(torch.globals, debug_name);
  PyObject* const early_stop = value_of(torch.globals, early_stop_name);
  options.early_stop =
      is_true(early_stop == nullptr || early_stop == Py_None ? settings[5] : early_stop);
  options.capture_check = CaptureCheck::Ignore;
  options.strict_unpack = true;
  options.buffers = BufferPolicy::Ignore;
  py::object recompute_context, on_error;
  if (is_true(debug == nullptr || debug == Py_None ? settings[4] : debug)) {
    if (context_fn != torch.noop_context_fn) {
      PyErr_SetString(PyExc_ValueError, "debug=True is incompatible with non-default context_fn");
      throw py::error_already_set();
    }
    set_determinism_check(options, settings[3]);
    const py::tuple found = call_python(torch.debug_contexts);
    forward_context = found[0];
    recompute_context = found[1];
    on_error = found[2];
  } else {
    set_determinism_check(options, settings[3]);
    if (context_fn != torch.noop_context_fn) {
      const py::tuple found = call_python(torch.contexts, py::handle(context_fn));
      if (!found[0].is_none()) options.policy = policy_in(found[0].ptr());
      if (!found[1].is_none()) forward_context = found[1];
      if (!found[2].is_none()) recompute_context = found[2];
    }
  }
  if (!c10::GradMode::is_enabled()) return;
  body = std::make_unique<Body>(call, InputArguments::Positional);
  body->set_contexts(recompute_context.ptr(), on_error.ptr());
}

void add_drop_in(py::module_& module) {
  add_generator(module);
  add_checkpoint_call(module);
  module.def("_set_upstream", [](const py::kwargs& all) {
    using U = Upstream;
    U& torch = upstream();
    take_names(
        torch, all,
        {REMAT_MEMBER(U, generator), REMAT_MEMBER(U, globals), REMAT_MEMBER(U, noop_context_fn),
         REMAT_MEMBER(U, default_metadata), REMAT_MEMBER(U, no_metadata),
         REMAT_MEMBER(U, is_tracing), REMAT_MEMBER(U, contexts), REMAT_MEMBER(U, debug_contexts),
         REMAT_MEMBER(U, fingerprint), REMAT_MEMBER(U, leave), REMAT_MEMBER(U, pass_on),
         REMAT_MEMBER(U, replaced_name), REMAT_MEMBER(U, replacement)});
    torch.throws = all["throws"].cast<bool>();
  });
  module.def("_calls_by_way", [] { return std::vector<int64_t>(counts.begin(), counts.end()); });
  module.def("_turn_drop_in", [](bool on) { upstream().is_on = on; });
}

}  // namespace remat::python
