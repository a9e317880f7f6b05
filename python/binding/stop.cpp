// The ends of a recompute of a Python function: by an error at an operator's boundary, or at the
// return of its call.

#include "stop.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>

#include <pthread.h>

#include <atomic>
#include <bitset>
#include <deque>
#include <utility>

namespace remat::python {

namespace {

/// The only thread that runs what Py_AddPendingCall was given; 0: not known.
std::atomic<unsigned long> main_thread{0};

/// The instructions after whose calls the interpreter was seen to run it. Of the main thread.
std::bitset<256> followed;

}  // namespace

/// The recompute and its parts that are at work on this thread.
static thread_local Rerun* innermost = nullptr;

Rerun::Rerun(const RegionBody* body)
    : body_(body), around_(std::exchange(innermost, this)), caller_(PyEval_GetFrame()) {}

Rerun::~Rerun() {
  innermost = around_;
  if (frame_ == nullptr) return;
  const ErrorAside aside;
  Py_CLEAR(frame_);
}

void Rerun::set_stop() {
  const Locked locked(Locked::AtEnd::Wait);
  PyErr_SetNone(names().stop);
  if (innermost != nullptr) innermost->has_stopped_ = true;
}

void Rerun::stop() {
  set_stop();
  throw python_error();
}

bool Rerun::has_stopped(const RegionBody* body) {
  return innermost != nullptr && innermost->body_ == body && innermost->has_stopped_;
}

const PyFrameObject* Rerun::caller() { return innermost == nullptr ? nullptr : innermost->caller_; }

const RegionBody* Rerun::innermost_body() {
  return innermost == nullptr ? nullptr : innermost->body_;
}

bool Rerun::take_stop() {
  if (PyErr_ExceptionMatches(names().stop) != 0) return PyErr_Clear(), true;
  if (!has_stopped_) return false;
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  auto cause = py::reinterpret_borrow<py::object>(value);
  constexpr int longest = 100;  // a program could make a ring of them
  for (int i = 0; cause && i < longest; ++i) {
    if (PyErr_GivenExceptionMatches(cause.ptr(), names().stop) != 0) {
      for (PyObject* each : {type, value, traceback}) Py_XDECREF(each);
      return true;
    }
    cause = py::reinterpret_steal<py::object>(PyException_GetCause(cause.ptr()));
  }
  PyErr_Restore(type, value, traceback);
  return false;
}

// ---- errors that are not swallowed --------------------------------------------------------------

namespace {

/// Exceptions in the order in which they will be raised. Interpreter's lock; leaked.
std::deque<PyObject*>& to_raise() {
  static auto* const all = new std::deque<PyObject*>;
  return *all;
}

// On the main thread, between two instructions.
int raise_first(void*) {
  if (to_raise().empty()) return 0;
  PyObject* const error = to_raise().front();
  to_raise().pop_front();
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(error));
  Py_INCREF(type);
  PyErr_Restore(type, error, PyException_GetTraceback(error));
  return -1;
}

/// An exception on its way through the library, any thread's.
class Arriving final : public python_error {
 public:
  explicit Arriving(bool always) : always_(always) { persist(); }
  Arriving(const Arriving&) = default;
  Arriving& operator=(const Arriving&) = delete;
  ~Arriving() override {
    if (type == nullptr) return;  // a caller has taken it
    const Locked locked(Locked::AtEnd::GiveUp);
    if (!locked) return;
    const ErrorAside aside;
    restore();
    if (always_)
      raise_later();
    else
      drop_error();
  }

 private:
  const bool always_;
};

}  // namespace

void raise_later() {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback != nullptr) PyException_SetTraceback(value, traceback);
  if (PyThread_get_thread_ident() == main_thread && Py_AddPendingCall(raise_first, nullptr) == 0) {
    to_raise().push_back(std::exchange(value, nullptr));
  } else {
    PyErr_Restore(std::exchange(type, nullptr), std::exchange(value, nullptr),
                  std::exchange(traceback, nullptr));
    PyErr_WriteUnraisable(nullptr);
  }
  Py_XDECREF(type);
  Py_XDECREF(traceback);
}

void drop_error() {
  if (PyErr_Occurred() == nullptr) return;
  if (PyErr_ExceptionMatches(PyExc_Exception) != 0) return PyErr_Clear();
  raise_later();
}

void throw_arriving(bool always) { throw Arriving(always); }

#if PY_VERSION_HEX >= 0x030B0000  // before, nothing tells the instruction at work in this way

namespace {

/// The instruction at work in a frame, as it was compiled; -1, without an error, if that is not
/// known.
int instruction_at(PyFrameObject* frame, int place) {
  const auto code =
      py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  const auto bytes = py::reinterpret_steal<py::object>(
      PyCode_GetCode(reinterpret_cast<PyCodeObject*>(code.ptr())));
  if (!bytes) PyErr_Clear();
  if (!bytes || place < 0 || place >= PyBytes_GET_SIZE(bytes.ptr())) return -1;
  return static_cast<unsigned char>(PyBytes_AS_STRING(bytes.ptr())[place]);
}

}  // namespace

bool Rerun::ask() {
  PyFrameObject* const frame = PyEval_GetFrame();
  // The caller's: the function has no frame of its own, and no code that could see where it ends.
  if (frame == nullptr || frame == caller_ || frame_ != nullptr) return false;
  const int place = PyFrame_GetLasti(frame);
  const int instruction = instruction_at(frame, place);
  const bool is_trial = body_ == nullptr;
  if (instruction < 0 || !(is_trial || followed.test(static_cast<std::size_t>(instruction))))
    return false;
  if (Py_AddPendingCall(raise_there, nullptr) != 0) return false;
  if (is_trial) followed.set(static_cast<std::size_t>(instruction));
  Py_INCREF(frame);
  frame_ = frame;
  instruction_ = place;
  return true;
}

// On the main thread, between two instructions.
int Rerun::raise_there(void*) {
  Rerun* asking = innermost;
  while (asking != nullptr && asking->frame_ == nullptr) asking = asking->around_;
  if (asking == nullptr) return 0;  // it has ended
  PyFrameObject* const frame = PyEval_GetFrame();
  if (frame != asking->frame_ || PyFrame_GetLasti(frame) != asking->instruction_) {
    Py_AddPendingCall(raise_there, nullptr);  // if there is no room, the function runs to its end
    return 0;
  }
  Py_CLEAR(asking->frame_);
  asking->has_stopped_ = true;
  PyErr_SetNone(names().stop);
  return -1;
}

PyObject* Rerun::ask_in_trial(PyObject*, PyObject*, PyObject*) {
  if (innermost != nullptr) innermost->ask();
  Py_RETURN_NONE;
}

/// Runs the trials, each of which calls `ask_in_trial` in another way, and continues if that has
/// not raised the stop. They run often enough for the interpreter to replace instructions by
/// others.
bool Rerun::can_ask() {
  enum class Trial { None, Failed, Passed };
  static Trial trial = Trial::None;
  if (trial != Trial::None) return trial == Trial::Passed;
  trial = Trial::Failed;  // also while it runs
  static PyMethodDef asking = {"_ask_in_trial",
                               reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(ask_in_trial)),
                               METH_VARARGS | METH_KEYWORDS, nullptr};
  const auto function = py::reinterpret_steal<py::object>(PyCFunction_New(&asking, nullptr));
  constexpr int times = 32;
  bool works = static_cast<bool>(function) && names().stop_trials != nullptr;
  for (Py_ssize_t i = 0; works && i < PyTuple_GET_SIZE(names().stop_trials); ++i)
    for (int time = 0; works && time < times; ++time) {
      Rerun rerun(nullptr);
      const auto result = py::reinterpret_steal<py::object>(in_python([&] {
        return PyObject_CallOneArg(PyTuple_GET_ITEM(names().stop_trials, i), function.ptr());
      }));
      works = !result && rerun.take_stop();
      if (result || works) continue;
      raise_later();  // a signal's
      trial = Trial::None;
    }
  if (works) trial = Trial::Passed;
  return works;
}

/// A mode may give the rest of the operator another meaning, as one that lets programs change what
/// was saved.
static bool is_under_modes() {
  using Modes = c10::impl::TorchDispatchModeTLS;
  for (int64_t i = 0; i < Modes::stack_len(); ++i)
    if (Modes::get_stack_at(i)->ptr(getPyInterpreter()) != names().dispatch_mode) return true;
  return false;
}

bool Rerun::stop_soon(const RegionBody* body) {
  if (innermost == nullptr || innermost->body_ != body || is_under_modes() ||
      PyThread_get_thread_ident() != main_thread.load(std::memory_order_relaxed))
    return false;
  const Locked locked(Locked::AtEnd::Wait);
  return can_ask() && innermost->ask();
}

#else

bool Rerun::stop_soon(const RegionBody*) { return false; }

#endif

void add_stop() {
  main_thread =
      py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  // The thread that forks is the main thread of the new process.
  pthread_atfork(nullptr, nullptr, [] { main_thread = PyThread_get_thread_ident(); });
}

}  // namespace remat::python
