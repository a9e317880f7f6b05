#pragma once
// Trees of Python modules, and turns over threads for those that change one.

#include <chrono>
#include <string>
#include <thread>

#include "containers.h"
#include "python.h"

namespace remat::python {

/// Returns whether the object is a torch.nn.Module.
bool is_module(PyObject* object);
/// Returns an entry of a dictionary, borrowed; null if there is none.
inline PyObject* entry(PyObject* dictionary, const char* name) {
  return PyDict_GetItemString(dictionary, name);
}

/// The place of a module in a tree; its text is made only when it is read.
struct ModulePath {
  const ModulePath* above;
  PyObject* name;
};
/// Returns the prefix of the names below the module: "layers.0."; "" for a root.
std::string text_of(const ModulePath* path);

/// Visits a module and all below it, until the visitor returns false: their attributes and the
/// path, null for the module itself. Interpreter's lock.
template <class Visitor>
bool visit_modules(PyObject* module, Visitor&& visitor, const ModulePath* path = nullptr,
                   int depth = 0) {
  constexpr int deepest = 200;  // a tree with a cycle ends somewhere
  const auto attributes =
      py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
  if (!attributes) return PyErr_Clear(), true;
  if (!visitor(attributes.ptr(), path)) return false;
  bool goes_on = true;
  if (depth < deepest)
    visit_entries(entry(attributes.ptr(), "_modules"), [&](PyObject* name, PyObject* value) {
      if (!goes_on || !is_module(value)) return;
      const ModulePath below{path, name};
      goes_on = visit_modules(value, visitor, &below, depth + 1);
    });
  return goes_on;
}

/// Waits, without the lock, until `is_free` returns true with it. Throws python_error with the text
/// after ten seconds.
template <class IsFree>
void wait_until(IsFree&& is_free, const char* text) {
  constexpr std::chrono::seconds longest_wait(10);
  const auto start = std::chrono::steady_clock::now();
  while (!is_free()) {
    if (std::chrono::steady_clock::now() - start > longest_wait) {
      PyErr_SetString(PyExc_RuntimeError, text);
      throw python_error();
    }
    const Unlocked unlocked;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace remat::python
