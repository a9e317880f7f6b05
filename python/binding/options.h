#pragma once
// The options of `checkpoint` as Python programs give them.

#include <vector>

#include "python.h"
#include "remat/options.h"

namespace remat::python {

/// Options by the names of the keyword arguments of `checkpoint`.
struct GivenOptions {
  CheckpointOptions options;
  std::vector<PyObject*> modules;  // borrowed from the argument

  /// Whether `name` is an option's; takes its value then. Throws python_error or
  /// py::error_already_set for a wrong value.
  bool take(PyObject* name, PyObject* value);
};

/// All of them; `modules` may be among them, or not, and are not in what is returned. Throws
/// python_error or py::error_already_set for others.
CheckpointOptions options_in(const py::dict& named, bool has_modules = false);

}  // namespace remat::python
