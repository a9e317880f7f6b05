#pragma once
// How the recompute of a function of Python's ends: by an error at an operator's boundary, or where
// its call returns.

#include "python.h"
#include "remat/binding.h"

namespace remat::python {

// Note [The stop]
// A C++ exception must not cross the interpreter's frames. An operator's boundary turns a
// `python_error` into the Python error that is set, as it does for one that a hook written in
// Python raises, and the function's frames are left one after the other, `with` and `finally`
// included.
//
// Note [The stop where a call returns]
// Such an exception takes several times what a small operator does, nearly all of it in LibTorch's
// frames. So where what the operator has left to do is next to nothing it runs to its end, and the
// interpreter raises the error: it runs what Py_AddPendingCall was given between two instructions,
// at the latest when the call that an instruction makes has returned. What is raised there is
// raised by that instruction, as if the call had failed; no other of the program's runs before.
// That call is the one that the program made: the interpreter may run other code until then, as of
// a destructor, of a mode or of a profiler, which is to see nothing. So the error is raised in one
// place only, the instruction that was at work when the tensor was saved; elsewhere the interpreter
// is asked again. (What is no Python between the instruction and the operator, as `map` or compiled
// code that calls several, runs to its end.) Only its main thread runs such calls, and not every
// instruction is followed by them (`x * y` is not): so which are is tried out once. Where it does
// not serve, the error comes at the operator's boundary.

// Note [What is swallowed]
// A signal's handler may raise anything between two instructions of the main thread: a timeout,
// SystemExit. So a recompute swallows two exceptions only: its stop, an object of a class that
// nothing else makes; and an exception that the function raised from the stop (`raise ... from
// error`). Any other one leaves `run_again`, also if the recompute has all it needs. The library
// drops what comes then, and elsewhere what a callback threw: so an exception that crosses the
// library knows whether somebody has taken it, and if not, the interpreter raises it at the main
// thread's next instruction. On another thread, where handlers do not run, it goes to
// sys.unraisablehook.

/// Has the interpreter raise the Python error that is set, at the next instruction of its main
/// thread: for a place that no exception can leave. See Note [What is swallowed].
void raise_later();
/// Drops the Python error that is set, if there is one. What is no `Exception` (SystemExit) is
/// raised later.
void drop_error();
/// Throws the Python error that is set. If nobody takes it, it is raised later: `always`, or what
/// is no `Exception`.
[[noreturn]] void throw_arriving(bool always);

/// While alive, a function runs again on this thread. The interpreter's lock is held by who makes
/// and ends it.
class Rerun {
 public:
  explicit Rerun(const RegionBody* body);
  ~Rerun();
  Rerun(const Rerun&) = delete;
  Rerun& operator=(const Rerun&) = delete;

  /// Sets the error that ends one.
  static void set_stop();
  /// Ends the innermost one on this thread. See Note [The stop].
  [[noreturn]] static void stop();
  /// The same if it is of `body`, by Note [The stop where a call returns]: whether it will end so.
  static bool stop_soon(const RegionBody* body);
  /// Returns whether `stop` has been raised in the innermost one on this thread, and that is of
  /// `body`.
  static bool has_stopped(const RegionBody* body);
  /// Of the innermost one on this thread: the frame that began it, only to be compared, and its
  /// body. Null without one.
  static const PyFrameObject* caller();
  static const RegionBody* innermost_body();
  /// The function has ended with a Python error: whether that is the stop, or was raised from it;
  /// then none is set any more.
  bool take_stop();
  /// Returns whether the library may drop what the function has ended with.
  bool may_have_all() const { return has_stopped_ || frame_ != nullptr; }

 private:
  bool ask();
  static int raise_there(void*);
  static bool can_ask();
  static PyObject* ask_in_trial(PyObject*, PyObject*, PyObject*);

  const RegionBody* const body_;
  Rerun* const around_;
  const PyFrameObject* const caller_;  // only to be compared
  PyFrameObject* frame_ = nullptr;     // where the error is to be raised; null: nowhere
  int instruction_ = 0;                // in it
  bool has_stopped_ = false;
};

}  // namespace remat::python
