#pragma once
// The ends of a recompute of a Python function: by an error at an operator's boundary, or at the
// return of its call.

#include "python.h"
#include "remat/binding.h"

namespace remat::python {

// Note [The stop]
// A C++ exception must not cross the interpreter's frames. An operator's boundary turns a
// `python_error` into the Python error that is set, as it does for an error of a Python hook. The
// function's frames are left one after the other, `with` and `finally` included.
//
// Note [The stop where a call returns]
// Such an exception takes several times as long as a small operator, nearly all of it in LibTorch's
// frames. So an operator that has next to nothing left to do runs to its end, and the interpreter
// raises the error. It runs a function that Py_AddPendingCall has registered, between two
// instructions, at the latest when the call of an instruction has returned. That instruction raises
// the function's error, as if its call had failed, and no other instruction of the program runs
// before. The call must be the program's own: until then the interpreter may run other code, of a
// destructor, of a mode or of a profiler, which must not see the error. So the error is raised in
// one place only, the instruction that was at work when the tensor was saved; elsewhere the
// interpreter is asked again. Code that is no Python between the instruction and the operator, such
// as `map` or compiled code that calls several, runs to its end. Only the interpreter's main thread
// runs such calls, and not after every instruction (`x * y` has none): a trial finds the
// instructions once. Otherwise the error comes at the operator's boundary.

// Note [What is swallowed]
// A signal's handler may raise anything between two instructions of the main thread: a timeout,
// SystemExit. So a recompute swallows two exceptions only: its stop, an object of a class with no
// other use; and an exception that the function raised from the stop (`raise ... from error`). Any
// other one leaves `run_again`, also if the recompute has all it needs. The library drops later
// errors, and elsewhere the errors of callbacks. So an exception that crosses the library knows
// whether a caller has taken it; if not, the interpreter raises it at the main thread's next
// instruction. On another thread, where handlers do not run, it goes to sys.unraisablehook.

/// Makes the interpreter raise the Python error that is set, at the next instruction of its main
/// thread: for a place that no exception can leave. See Note [What is swallowed].
void raise_later();
/// Drops the Python error that is set, if there is one. An error that is no `Exception`
/// (SystemExit) is raised later.
void drop_error();
/// Throws the Python error that is set. If no caller takes it, it is raised later: `always`, or if
/// it is no `Exception`.
[[noreturn]] void throw_arriving(bool always);

/// A rerun of a function on this thread, while alive. Its maker and its ender hold the
/// interpreter's lock.
class Rerun {
 public:
  explicit Rerun(const RegionBody* body);
  ~Rerun();
  Rerun(const Rerun&) = delete;
  Rerun& operator=(const Rerun&) = delete;

  /// Sets the error that ends a recompute.
  static void set_stop();
  /// Ends the innermost recompute on this thread. See Note [The stop].
  [[noreturn]] static void stop();
  /// Does the same if the innermost recompute is of `body`, by Note [The stop where a call
  /// returns]. Returns whether it will end so.
  static bool stop_soon(const RegionBody* body);
  /// Returns whether `stop` has been raised in the innermost recompute on this thread, and that is
  /// of `body`.
  static bool has_stopped(const RegionBody* body);
  /// The frame that began the innermost recompute on this thread, only to be compared, and its
  /// body. Null without one.
  static const PyFrameObject* caller();
  static const RegionBody* innermost_body();
  /// Clears the function's error if that is the stop or was raised from it, and returns whether it
  /// was.
  bool take_stop();
  /// Returns whether the library may drop the error that ended the function.
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
