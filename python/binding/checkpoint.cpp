// `checkpoint`: a call of Python's as a region, with its options and the modules behind it.

#include <c10/util/SmallVector.h>

#include "modules.h"
#include "options.h"
#include "region.h"

namespace remat::python {

namespace {

/// checkpoint(function, *args, **options_and_kwargs)
PyObject* checkpoint(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* keywords) {
  if (count == 0) return PyObject_Vectorcall(names().decorator, arguments, 0, keywords);
  static const CheckpointOptions defaults;
  Call call{arguments[0], arguments + 1, count - 1, keywords};
  return returned([&] {
    if (PyType_Check(call.function) != 0 || PyCallable_Check(call.function) == 0)
      call_python(names().refuse_function, "remat.checkpoint", py::handle(call.function));
    PyObject* const module = module_in(call.function);
    if (keywords == nullptr) {
      PyObject* const result =
          module == nullptr ? run_region(defaults, call) : run_region(defaults, call, {module});
      if (result == nullptr && count == 1 && PyErr_ExceptionMatches(PyExc_TypeError) != 0)
        improve_error(names().unbound, call.function);
      return result;
    }
    GivenOptions given;
    if (module != nullptr) given.modules.push_back(module);
    c10::SmallVector<PyObject*, 16> own(call.arguments, call.arguments + call.num_positional);
    py::list own_names;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(keywords); ++i) {
      PyObject* const name = PyTuple_GET_ITEM(keywords, i);
      PyObject* const value = call.arguments[call.num_positional + i];
      if (given.take(name, value)) continue;
      own.push_back(value);
      own_names.append(py::handle(name));
    }
    const py::object kept_names = own_names.empty() ? py::object() : py::tuple(own_names);
    call.names = kept_names.ptr();
    call.arguments = own.data();
    PyObject* const result = run_region(given.options, call, given.modules);
    if (result == nullptr && !own_names.empty() && PyErr_ExceptionMatches(PyExc_TypeError) != 0)
      improve_error(names().not_taken, py::make_tuple(py::handle(call.function), own_names).ptr());
    return result;
  });
}

/// _run_module(options, forward, module, *args, **kwargs)
PyObject* run_module(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* keywords) {
  return returned([&] {
    const auto& options = py::handle(arguments[0]).cast<const CheckpointOptions&>();
    return run_region(options, {arguments[1], arguments + 2, count - 2, keywords}, {arguments[2]});
  });
}

/// _run_watched(forward, module, *args, **kwargs): calls it plainly, except that regions around it
/// know of the module.
PyObject* run_watched(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* keywords) {
  return returned([&] {
    const ModulesWatched watched({arguments[1]});
    return Call{arguments[0], arguments + 1, count - 1, keywords}.run();
  });
}

constexpr char checkpoint_text[] =
    R"(checkpoint(function, /, *args, name="", policy=None, early_stop=True,
           determinism_check="metadata", fingerprint=None, capture_check="raise",
           offload_inputs=False, offload_prefetch_depth=2, preserve_rng_state=True,
           input_mode="shared", buffers="restore", modules=(), strict_unpack=False, debug=False,
           level=None, value_comparison=None, handle=None, prepare_ahead=0, transforms="plain",
           **kwargs)
checkpoint(**options) -> a decorator, `@checkpoint()` without options
--

Runs `function(*args, **kwargs)` now and returns its result. Tensors that autograd saves inside are
not kept: they are computed again, by running `function` again with the same arguments, when
backward first reads one.

Memory: tensors among the arguments stay until the graph that refers to the region is gone; under an
enclosing region not even they do. Tensors in a container or another object stay as they are, with
their history.
Arguments: a tensor arrives in a recompute with the same data and without its history; a leaf,
and a tensor that needs no gradient, as the same object.

name: shown in errors, reports and traces.
policy: the results that are kept instead of recomputed: `save_ops([...])`, `save_matmuls()`,
    `a | b`, or a function of a PolicyContext that returns a CheckpointPolicy or a bool.
early_stop: a recompute ends with the last tensor that backward needs.
determinism_check: the comparison of recomputed tensors with those of forward: "none" (their
    number), "metadata" (shape, dtype, device), "layout" (strides too), "values" (bitwise).
fingerprint: a function of a tensor, whose results' texts are compared instead.
capture_check: "raise" if a parameter or captured tensor changed before the recompute, or "ignore".
offload_inputs: inputs on an accelerator wait on the CPU.
offload_prefetch_depth: with `offload_inputs`, the number of copies back that are begun ahead of the
    one that is read, in the reverse order of the regions, among regions with the same number; 0:
    none.
preserve_rng_state: a recompute draws the random numbers that forward drew: from the default
    generators, from any other of the CPU, and from one that is an argument itself.
    `preserve_generator` is for others.
input_mode: "copy_on_write" for functions that write to their arguments.
buffers: "restore": a recompute sees the buffers of the function's modules (running statistics) as
    forward saw them, and puts them back; "ignore": it writes them once more. The function is a
    module, its bound method, or a functools.partial of one; other modules that it calls are named
    in `modules`. Recomputes also see forward's training flags of these modules.
strict_unpack: a second read of a saved tensor in one backward is an error instead of one more
    recompute.
debug: records the operators of both passes for the error report.
level: under `checkpoint_level(n)` the call is a region if n >= level, otherwise it runs plainly; 0:
    never. None: always.
    With a level, a function that is a module in eval mode runs plainly.
value_comparison: a ValueComparison, the rule of determinism_check="values" for elements.
handle: a RegionHandle that refers to the region from its end on.
prepare_ahead: number of regions with this option that a backward recomputes ahead when it first
    reads this one, in the reverse order in which this thread ran them.
transforms: inside torch.func's transforms and with forward-mode tangents the function runs without
    a region ("plain", with one warning), or the call is refused ("refuse").

Grad mode off: the function runs plainly.
Threads: any; a recompute runs on the thread of the backward that reads.
Raises: errors of `function`, with their traceback; CheckpointError; ValueError for options of a
wrong value, TypeError for those of a wrong type.)";

}  // namespace

void add_checkpoint(py::module_& module) {
  add_function(module, "checkpoint", checkpoint, checkpoint_text);
  add_function(module, "_run_module", run_module);
  add_function(module, "_run_watched", run_watched);
  py::class_<CheckpointOptions>(module, "_Options")
      .def(py::init(wrapped([](const py::dict& options) { return options_in(options); })));
  module.def("set_default_options",
             wrapped([](const std::string& text) { set_default_options(text); }));
  module.def("default_options", wrapped([] { return default_options(); }));
  module.def("_check_options",
             wrapped([](const py::dict& options) { options_in(options, /*has_modules=*/true); }));
}

}  // namespace remat::python
