#pragma once
// What all sources of the extension module need of CPython: objects that may die on any thread, and
// errors.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/python_headers.h>
#include <torch/csrc/utils/pybind.h>

#include <cxxabi.h>

#include <exception>
#include <utility>

#include "remat/error.h"

namespace remat::python {

/// A strong reference that only threads which hold the interpreter's lock touch.
using Object = py::object;

/// What the pure Python part of the package tells the extension once, at import.
struct Names {
  PyObject* stop = nullptr;             ///< the class that ends a recompute, an exception
  PyObject* stop_trials = nullptr;      ///< a tuple of functions that call their argument
  PyObject* dispatch_mode = nullptr;    ///< what stands for the library among dispatch modes
  PyObject* make_error = nullptr;       ///< makes a CheckpointError of what it knows
  PyObject* run_in = nullptr;           ///< runs a function inside context managers
  PyObject* device_context = nullptr;   ///< finds the `torch.device` that is a context now, or None
  PyObject* decorator = nullptr;        ///< makes a decorator of options
  PyObject* refuse_function = nullptr;  ///< raises for what is no function
  PyObject* unbound = nullptr;  ///< the error for a function that was called without its arguments
  PyObject* free_hooks = nullptr;  ///< frees what hooks of a recompute hold
};
/// Never freed: the process may end while regions are alive.
Names& names();

/// Sets the Python error that `error` is. The interpreter's lock is held.
void set_error(const CheckpointError& error);
/// The exception that `error` is, as a new reference; null with a Python error set.
PyObject* make_error(const CheckpointError& error);
/// Sets the Python error that the exception in flight is. To be called in a handler, with the lock
/// held.
void set_error_in_flight() noexcept;
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

/// Calls Python, or takes its lock, below C++ frames. See Note [The end of the process].
/// What is caught is no object: the sanitizer of null references would end the process here.
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

/// The interpreter's lock is let go of while this is alive. See Note [The end of the process].
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

/// Lets regions see Python's hooks.
void add_hook_tables();  // hook_tables.cpp
/// Adds what a source defines to the module. They throw py::error_already_set.
void add_process(py::module_& module);      // process.cpp
void add_region(py::module_& module);       // region.cpp
void add_stop(py::module_& module);         // stop.cpp
void add_hook_cycles(py::module_& module);  // hook_cycles.cpp
void add_drop_in(py::module_& module);      // drop_in.cpp
void add_backward(py::module_& module);     // backward.cpp
void add_policy(py::module_& module);       // policy.cpp
void add_modules(py::module_& module);      // modules.cpp
void add_save_region(py::module_& module);  // save_region.cpp
void add_guards(py::module_& module);       // guards.cpp
void add_observe(py::module_& module);      // observe.cpp
void add_plan(py::module_& module);         // plan.cpp

}  // namespace remat::python
