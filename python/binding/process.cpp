// The interpreter around the regions: its lock, its end, its exceptions.

#include <torch/csrc/PyInterpreter.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "python.h"
#include "remat/binding.h"
#include "remat/words.h"
#include "stop.h"

namespace remat::python {

namespace {

/// Threads that are on the way to the lock, or run a recompute under it.
std::atomic<int> num_inside{0};
/// The share of this thread in them: others wait for this thread, so that it must not wait itself.
thread_local int depth = 0;
std::atomic<bool> is_ending{false};
std::thread::id ending_thread;

/// Waits for the lock while others have it, as every wait of the library must.
class LetGo final : public WaitCallbacks {
 public:
  std::shared_ptr<void> let_go() noexcept override {
    if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) return nullptr;
    return std::make_shared<Unlocked>();
  }
};

/// Called by atexit, with the lock held.
void interpreter_ends() {
  ending_thread = std::this_thread::get_id();
  is_ending.store(true);
  const Unlocked unlocked;
  // A recompute that runs now may take long, or wait for something that never comes.
  constexpr std::chrono::seconds longest_wait(2);
  const auto start = std::chrono::steady_clock::now();
  while (num_inside.load() != 0 && std::chrono::steady_clock::now() - start < longest_wait)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

/// Pairs of a phrase of C++ and its Python form. Plain texts: a warning may come where the
/// interpreter's lock must not be taken. Set once, at import; never freed.
std::vector<std::pair<std::string, std::string>>& python_words() {
  static auto* const all = new std::vector<std::pair<std::string, std::string>>;
  return *all;
}

std::string in_python_words(std::string text) {
  for (const auto& [theirs, ours] : python_words())
    for (std::size_t at = text.find(theirs); at != std::string::npos;
         at = text.find(theirs, at + ours.size()))
      text.replace(at, theirs.size(), ours);
  return text;
}

/// Returns whether this thread has the lock; also safe while the interpreter ends, since it reads
/// no freed state.
bool has_lock() { return PyGILState_GetThisThreadState() != nullptr && PyGILState_Check() != 0; }

/// Returns whether this thread may ask for the lock. A thread that has it does not ask, and must
/// not wait: with the lock it would keep the interpreter from its end.
bool may_enter() {
  if (has_lock()) return true;
  if (Py_IsInitialized() == 0) return false;
  return depth > 0 || !is_ending.load() || std::this_thread::get_id() == ending_thread;
}

}  // namespace

void wait_for_the_end() noexcept {
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

Names& names() {
  static Names all;
  return all;
}

Locked::Locked(AtEnd at_end) {
  num_inside.fetch_add(1);
  if (!may_enter()) {
    num_inside.fetch_sub(1);
    if (at_end == AtEnd::Wait) wait_for_the_end();
    return;
  }
  in_python([&] { new (lock_) py::gil_scoped_acquire(); });
  ++depth;
  is_locked_ = true;
}

Locked::~Locked() {
  if (!is_locked_) return;
  --depth;
  std::launder(reinterpret_cast<py::gil_scoped_acquire*>(lock_))->~gil_scoped_acquire();
  num_inside.fetch_sub(1);
}

void drop(PyObject* const* objects, std::size_t count) noexcept {
  const Locked locked(Locked::AtEnd::GiveUp);
  if (!locked) return;
  const ErrorAside aside;  // a dying object may run code while an exception is on its way
  in_python([&] {
    for (std::size_t i = 0; i < count; ++i) Py_XDECREF(objects[i]);
  });
}

std::shared_ptr<PyObject> shared(py::handle object) {
  return {object.inc_ref().ptr(), [](PyObject* last) { drop(&last, 1); }};
}

PyObject* imported(const char* module, const char* name) {
  return py::object(py::module_::import(module).attr(name)).release().ptr();
}

void add_function(py::module_& module, const char* name, Vectorcall function, const char* text) {
  auto* const method =
      new PyMethodDef{// as long as the process
                      name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
                      METH_FASTCALL | METH_KEYWORDS, text};
  module.attr(name) =
      py::reinterpret_steal<py::object>(PyCFunction_NewEx(method, nullptr, nullptr));
}

PyObject* make_error(const CheckpointError& error) {
  py::list mismatches;
  for (const CheckpointError::Mismatch& each : error.mismatches())
    mismatches.append(py::make_tuple(each.position, each.forward, each.recompute, each.forward_op,
                                     each.recompute_op, each.forward_tensor,
                                     each.recompute_tensor));
  return PyObject_CallFunction(names().make_error, "isOLLLO", static_cast<int>(error.kind()),
                               error.what_without_backtrace(), py::str(error.region()).ptr(),
                               static_cast<long long>(error.frame_id()),
                               static_cast<long long>(error.forward_count()),
                               static_cast<long long>(error.recompute_count()), mismatches.ptr());
}

void set_error(const CheckpointError& error) {
  PyObject* const made = make_error(error);
  if (made == nullptr) return;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made)), made);
  Py_DECREF(made);
}

__attribute__((no_sanitize("null"))) void set_error_in_flight() noexcept {
  try {
    throw;
  } catch (
      python_error&
          error) {  // the stop of a region around: thrown once more, it would cost as much again
    error.restore();
  } catch (const CheckpointError& error) {
    set_error(error);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
  } catch (abi::__forced_unwind&) {  // out of Python code that `in_python` is not around
    wait_for_the_end();
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "remat: an unknown C++ exception");
  }
}

void improve_error(PyObject* better_of, PyObject* argument) {
  if (better_of == nullptr) return;  // while the package is imported
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  PyObject* const better = in_python([&] {
    return argument == nullptr ? PyObject_CallOneArg(better_of, value)
                               : PyObject_CallFunctionObjArgs(better_of, argument, value, nullptr);
  });
  if (better == value) {
    PyErr_Restore(type, value, traceback);
  } else {  // null: a signal's exception is set
    if (better != nullptr) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(better)), better);
    for (PyObject* each : {type, value, traceback}) Py_XDECREF(each);
  }
  Py_XDECREF(better);
}

void throw_persisted() { throw_arriving(/*always=*/false); }

void add_process(py::module_& module) {
  // Torch before 2.8 has none of its own, so that all of these were RuntimeError, with the C++
  // stack in their text.
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const CheckpointError& found) {
      set_error(found);
    } catch (const c10::Error&) {
      torch::translate_exception_to_python(error);
      improve_error(names().said_in_python);
    }
  });
  static LetGo let_go;
  set_wait_callbacks(&let_go);
  module.def("_interpreter_ends", interpreter_ends);
  module.def("_set_names", [](const py::kwargs& all) {
    take_names(names(), all,
               {REMAT_MEMBER(Names, stop), REMAT_MEMBER(Names, stop_trials),
                REMAT_MEMBER(Names, dispatch_mode), REMAT_MEMBER(Names, make_error),
                REMAT_MEMBER(Names, make_budget_error), REMAT_MEMBER(Names, said_in_python),
                REMAT_MEMBER(Names, check), REMAT_MEMBER(Names, run_in),
                REMAT_MEMBER(Names, device_context), REMAT_MEMBER(Names, decorator),
                REMAT_MEMBER(Names, refuse_function), REMAT_MEMBER(Names, unbound),
                REMAT_MEMBER(Names, not_taken), REMAT_MEMBER(Names, free_hooks),
                REMAT_MEMBER(Names, engine_run_backward)});
    if (all.contains("dispatch_mode")) set_dispatch_mode(names().dispatch_mode, getPyInterpreter());
  });
  module.def("_set_words", [](std::vector<std::pair<std::string, std::string>> words) {
    set_warning_words(nullptr);
    python_words() = std::move(words);
    set_warning_words(in_python_words);
  });
}

}  // namespace remat::python
