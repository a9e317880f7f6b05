#pragma once
// Policies as Python objects.

#include <torch/csrc/python_headers.h>

#include "remat/policy.h"

namespace remat::python {

/// The policy that an argument is: a Policy, a Python function, or None. Throws python_error or
/// py::error_already_set for anything else.
Policy policy_in(PyObject* object);

}  // namespace remat::python
