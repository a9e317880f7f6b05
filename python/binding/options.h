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

  /// Returns whether `name` is an option, and takes its value if so. Throws python_error or
  /// py::error_already_set for a wrong value.
  bool take(PyObject* name, PyObject* value);
};

/// Returns all options; `modules` may be among the keywords, but is not part of the result. Throws
/// python_error or py::error_already_set for unknown ones.
CheckpointOptions options_in(const py::dict& named, bool has_modules = false);

}  // namespace remat::python
