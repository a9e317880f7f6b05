// A call of torch.utils.checkpoint.checkpoint that is a region at once.

#include <c10/util/SmallVector.h>

#include <cstddef>
#include <string>

#include "drop_in.h"

namespace remat::python {

namespace {

// Note [The call itself]
// `torch.utils.checkpoint.checkpoint` keeps torch.compile off: it calls the function behind it by
// an attribute, `__dynamo_disable`. While the drop-in is installed, the attribute holds this
// function, so that `checkpoint` is the same object for all programs. The plain calls, with
// use_reentrant=False, without contexts and without debug, are regions here. All others continue in
// upstream's code, and reach the generator (drop_in_generator.cpp), if they are non-reentrant: it
// does the same in six calls of Python more.

/// The arguments of `checkpoint` apart from its options.
class PlainCall {
 public:
  /// Throws python_error.
  PlainCall(PyObject* const* arguments, Py_ssize_t count, PyObject* keywords)
      : arguments_(arguments), count_(count) {
    settings_[0] = count > 0 ? arguments[0] : nullptr;
    note_reentrant(keywords);
    is_plain_ = count > 0 && keywords != nullptr && read(keywords) && is_non_reentrant_ &&
                !is_debug_enabled() && !is_generator_other();
  }

  /// Returns whether it is a plain region.
  explicit operator bool() const { return is_plain_; }
  bool is_non_reentrant() const { return is_non_reentrant_; }
  PyObject* const* settings() const { return settings_; }
  Call call() const {
    if (!names_) return {arguments_[0], arguments_ + 1, count_ - 1, nullptr};
    return {arguments_[0], with_names_.data(), count_ - 1, names_.ptr()};
  }

 private:
  static bool is(PyObject* name, PyObject* other) {
    return name == other || PyUnicode_Compare(name, other) == 0;
  }
  static PyObject* global(PyObject* name) {
    return PyDict_GetItemWithError(upstream().globals, name);
  }
  /// The flag of the process that would override `debug`.
  static bool is_debug_enabled() {
    static PyObject* const name = interned("_checkpoint_debug_enabled");
    PyObject* const value = global(name);
    return value != nullptr && value != Py_None && value != Py_False;
  }
  /// Returns whether the program has installed a generator of its own there.
  static bool is_generator_other() {
    return global(upstream().replaced_name) != upstream().replacement;
  }

  static PyObject* use_reentrant_name() {
    static PyObject* const name = interned("use_reentrant");
    return name;
  }
  void note_reentrant(PyObject* keywords) {
    const Py_ssize_t num_named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
    for (Py_ssize_t i = 0; i < num_named; ++i)
      if (is(PyTuple_GET_ITEM(keywords, i), use_reentrant_name()))
        is_non_reentrant_ = arguments_[count_ + i] == Py_False;
  }

  bool read(PyObject* keywords) {
    static PyObject* const preserve = interned("preserve_rng_state");
    static PyObject* const context_fn = interned("context_fn");
    static PyObject* const determinism_check = interned("determinism_check");
    static PyObject* const debug = interned("debug");
    static PyObject* const early_stop = interned("early_stop");
    static PyObject* const standard = interned("default");
    static PyObject* const function = interned("function");
    settings_[1] = settings_[5] = Py_True;
    settings_[2] = upstream().noop_context_fn;
    settings_[3] = standard;
    settings_[4] = Py_False;
    const Py_ssize_t num_named = PyTuple_GET_SIZE(keywords);
    c10::SmallVector<PyObject*, 4> others;
    for (Py_ssize_t i = 0; i < num_named; ++i) {
      PyObject* const name = PyTuple_GET_ITEM(keywords, i);
      PyObject* const value = arguments_[count_ + i];
      if (is(name, use_reentrant_name())) continue;
      if (is(name, preserve)) {
        settings_[1] = value;
      } else if (is(name, context_fn)) {
        if (value != upstream().noop_context_fn) return false;
      } else if (is(name, determinism_check)) {
        settings_[3] = value;
      } else if (is(name, debug)) {
        if (value != Py_False) return false;
      } else if (is(name, early_stop)) {
        settings_[5] = value;
      } else if (is(name, function)) {
        return false;  // upstream's own parameter, which is there already
      } else {
        if (others.empty()) with_names_.append(arguments_ + 1, arguments_ + count_);
        with_names_.push_back(value);
        others.push_back(name);
      }
    }
    if (others.empty()) return true;
    py::tuple names(others.size());
    for (std::size_t i = 0; i < others.size(); ++i) names[i] = py::handle(others[i]);
    names_ = std::move(names);
    return true;
  }

  PyObject* const* const arguments_;
  const Py_ssize_t count_;
  PyObject* settings_[num_settings]{};
  bool is_plain_ = false, is_non_reentrant_ = false;
  c10::SmallVector<PyObject*, 8> with_names_;  // the function's arguments, if some have names
  py::object names_;
};

/// Ends a region whose function has raised; its error stays set.
void close(DropInRun& run) {
  {
    const ErrorAside aside;
    run.forward.reset();
  }
  // Upstream passes the error to a generator, which raises this one as another.
  if (upstream().throws && PyErr_ExceptionMatches(PyExc_StopIteration) != 0)
    py::raise_from(PyExc_RuntimeError, "generator raised StopIteration");
}

/// Runs the function as a region. Null with a Python error set.
PyObject* run_plain(const PlainCall& plain) {
  DropInRun run;
  const Call call = plain.call();
  if (!guarded([&] { return run.prepare(plain.settings(), call), run.open(); })) return nullptr;
  py::object result;
  {
    const WithoutCompiler uncompiled;
    result = py::reinterpret_steal<py::object>(call.run());
  }
  if (!result) return close(run), nullptr;
  if (!guarded([&] { return run.finish(), true; })) return nullptr;
  return result.release().ptr();
}

/// See Note [The call itself].
PyObject* checkpoint(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* keywords) {
  return returned([&] {
    const PlainCall plain(arguments, count, keywords);
    if (plain && upstream().is_on && way_of_call() == Way::Region) {
      count_call(Way::Region);
      return run_plain(plain);
    }
    // Others are counted where they reach the generator.
    if (upstream().is_on && !plain.is_non_reentrant()) count_call(Way::Reentrant);
    return PyObject_Vectorcall(upstream().pass_on, arguments, static_cast<std::size_t>(count),
                               keywords);
  });
}

}  // namespace

void add_checkpoint_call(py::module_& module) { add_function(module, "_checkpoint", checkpoint); }

}  // namespace remat::python
