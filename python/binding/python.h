#pragma once
// The tools of CPython that all sources of the extension module need: objects that may die on any
// thread, and errors.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/python_headers.h>
#include <torch/csrc/utils/pybind.h>

#include <c10/util/Metaprogramming.h>

#include <cxxabi.h>

#include <exception>
#include <functional>
#include <initializer_list>
#include <memory>
#include <type_traits>
#include <utility>

#include "remat/error.h"

namespace remat::python {

/// A strong reference that only threads which hold the interpreter's lock touch.
using Object = py::object;

/// The objects of the pure Python part of the package, set once at import. Never freed: the process
/// may end while regions are alive.
struct Names {
  PyObject* stop = nullptr;           ///< the class that ends a recompute, an exception
  PyObject* stop_trials = nullptr;    ///< a tuple of functions that call their argument
  PyObject* dispatch_mode = nullptr;  ///< stands for the library among dispatch modes
  PyObject* make_error = nullptr;     ///< makes a CheckpointError of its facts
  PyObject* make_budget_error = nullptr;
  PyObject* said_in_python = nullptr;   ///< an error, or the same in Python's words
  PyObject* check = nullptr;            ///< the validator of arguments: remat/_arguments.py
  PyObject* run_in = nullptr;           ///< runs a function inside context managers
  PyObject* device_context = nullptr;   ///< finds the present `torch.device` context, or None
  PyObject* decorator = nullptr;        ///< makes a decorator of options
  PyObject* refuse_function = nullptr;  ///< raises for an object that is no function
  PyObject* unbound = nullptr;  ///< the error for a function that was called without its arguments
  PyObject* not_taken = nullptr;            ///< ... with upstream's options, which it does not take
  PyObject* free_hooks = nullptr;           ///< frees the objects that hooks of a recompute hold
  PyObject* engine_run_backward = nullptr;  ///< of torch's engine
};
Names& names();

/// A member of a struct, and its name in Python.
#define REMAT_MEMBER(T, member) {#member, &T::member}

/// Takes each entry of `given` that has one of these names, for good.
template <class T>
void take_names(T& all, const py::dict& given,
                std::initializer_list<std::pair<const char*, PyObject * T::*>> members) {
  for (const auto& [name, member] : members)
    if (given.contains(name)) all.*member = py::object(given[name]).release().ptr();
}

inline PyObject* new_reference(PyObject* object) {
  Py_XINCREF(object);
  return object;
}
/// Returns an object of a module of Python, as a new reference.
PyObject* imported(const char* module, const char* name);

/// Keeps the Python error that is set out of the way while this is alive.
class ErrorAside {
 public:
  ErrorAside() { PyErr_Fetch(&type_, &value_, &traceback_); }
  ~ErrorAside() { PyErr_Restore(type_, value_, traceback_); }
  ErrorAside(const ErrorAside&) = delete;
  ErrorAside& operator=(const ErrorAside&) = delete;

 private:
  PyObject *type_ = nullptr, *value_ = nullptr, *traceback_ = nullptr;
};

/// Sets the Python error of `error`. The interpreter's lock is held.
void set_error(const CheckpointError& error);
/// Returns the exception of `error`, as a new reference; null with a Python error set.
PyObject* make_error(const CheckpointError& error);
/// Sets the Python error of the exception in flight. Called in a handler, with the lock held.
void set_error_in_flight() noexcept;
/// Replaces the Python error that is set by the result of `better_of(arguments..., error)`, if that
/// is another one.
void improve_error(PyObject* better_of, PyObject* argument = nullptr);
/// Throws the Python error that is set, so that it may cross threads.
[[noreturn]] void throw_persisted();

// Note [The end of the process]
// While the interpreter ends, a thread that asks for its lock is ended where it stands, by an
// exception that no handler may keep and no destructor may let through: with C++ frames on its
// stack the process aborts. An engine's thread or a daemon thread that drops a graph would get
// there with the references that the graph's regions hold, where plain torch holds none. So from
// the interpreter's atexit on, other threads than the one that ends it do not ask for the lock any
// more: references leak, and a recompute waits for the process to end. Those that have asked before
// are waited for, though not for ever. A thread whose region is still at work then meets that
// exception in the region's function, where a function without a region has C frames alone and is
// ended quietly. So wherever this package calls Python or takes the lock, `in_python` catches the
// exception before anything is unwound, and the thread waits there for the process to end. What is
// left are LibTorch's own frames inside the function, which abort without a region, too.

/// Never returns. The lock is not held, and nothing on this thread's stack is touched any more.
[[noreturn]] void wait_for_the_end() noexcept;

/// Calls Python, or takes its lock, below C++ frames. See Note [The end of the process]. The
/// handler catches no object: the sanitizer of null references would end the process here.
template <class Action>
__attribute__((no_sanitize("null"))) decltype(auto) in_python(Action&& action) {
  try {
    return action();
  } catch (abi::__forced_unwind&) {
    wait_for_the_end();
  }
}

/// `function(*arguments)`. Throws py::error_already_set.
template <class... Arguments>
py::object call_python(py::handle function, Arguments&&... arguments) {
  const py::tuple all = py::make_tuple(std::forward<Arguments>(arguments)...);
  PyObject* const result =
      in_python([&] { return PyObject_CallObject(function.ptr(), all.ptr()); });
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

/// Returns the reference that `action` returns; null with a Python error set if it throws.
template <class Action>
PyObject* returned(Action&& action) {
  try {
    return action();
  } catch (...) {
    set_error_in_flight();
    return nullptr;
  }
}

/// Returns the reference or flag of `action`; null or false with a Python error set. Warnings of
/// the library go to Python.
template <class Action>
auto guarded(Action&& action) -> decltype(action()) {
  try {
    torch::PyWarningHandler warnings;
    try {
      if (auto result = action()) return result;
      warnings.set_in_exception();
    } catch (...) {
      warnings.set_in_exception();
      set_error_in_flight();
    }
  } catch (...) {
    set_error_in_flight();
  }
  return {};
}

template <class Function, class Result, class... Arguments>
auto wrapped_as(Function function, std::type_identity<Result(Arguments...)>) {
  return [function](Arguments... arguments) -> Result {
    try {
      torch::PyWarningHandler warnings;
      try {
        return function(std::forward<Arguments>(arguments)...);
      } catch (...) {
        warnings.set_in_exception();
        set_error_in_flight();
      }
    } catch (...) {
      set_error_in_flight();
    }
    improve_error(names().said_in_python);
    throw py::error_already_set();
  };
}
/// A function for the module: errors of the library arrive as the package's, in Python's words.
template <class Function>
auto wrapped(Function function) {
  using Type = typename c10::guts::infer_function_traits_t<Function>::func_type;
  return wrapped_as(std::move(function), std::type_identity<Type>());
}

/// Returns the value that the package's validator reads: see remat/_arguments.py. Throws
/// py::error_already_set for one that does not fit the annotation.
inline py::object checked(const char* user, const char* name, const char* annotation,
                          py::handle value) {
  return call_python(names().check, user, name, annotation, value);
}

/// Releases the interpreter's lock while alive. See Note [The end of the process].
class Unlocked {
 public:
  Unlocked() : thread_(PyEval_SaveThread()) {}
  ~Unlocked() {
    in_python([&] { PyEval_RestoreThread(thread_); });
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* const thread_;
};

/// The interpreter's lock, for code that any thread may come to. See Note [The end of the process].
class Locked {
 public:
  enum class AtEnd {
    Wait,   ///< never returns where the interpreter is ending
    GiveUp  ///< then nothing is locked
  };
  explicit Locked(AtEnd at_end);
  ~Locked();
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  explicit operator bool() const { return is_locked_; }

 private:
  bool is_locked_ = false;
  alignas(py::gil_scoped_acquire) unsigned char lock_[sizeof(py::gil_scoped_acquire)];
};

/// Drops references on any thread.
void drop(PyObject* const* objects, std::size_t count) noexcept;
/// A reference that dies on any thread.
std::shared_ptr<PyObject> shared(py::handle object);

/// Calls with the lock, on any thread; a Python error crosses threads.
template <class Action>
auto call_locked(Action&& action) {
  const Locked locked(Locked::AtEnd::Wait);
  try {
    return action();
  } catch (...) {
    set_error_in_flight();
  }
  throw_persisted();
}

using Vectorcall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);
/// Adds a function that is called without a tuple and a dictionary of its arguments.
void add_function(py::module_& module, const char* name, Vectorcall function,
                  const char* text = nullptr);

/// Lets regions see Python's hooks.
void add_hook_tables();  // hook_tables.cpp
/// Adds the definitions of a source to the module. They throw py::error_already_set.
void add_process(py::module_& module);      // process.cpp
void add_checkpoint(py::module_& module);   // checkpoint.cpp
void add_stop();                            // stop.cpp
void add_hook_cycles(py::module_& module);  // hook_cycles.cpp
void add_drop_in(py::module_& module);      // drop_in.cpp
void add_backward(py::module_& module);     // backward.cpp
void add_policy(py::module_& module);       // policy.cpp
void add_save_region(py::module_& module);  // save_region.cpp
void add_paths(py::module_& module);        // paths.cpp
void add_guards(py::module_& module);       // guards.cpp
void add_observe(py::module_& module);      // observe.cpp
void add_plan(py::module_& module);         // plan.cpp
void add_budget(py::module_& module);       // budget.cpp

}  // namespace remat::python
