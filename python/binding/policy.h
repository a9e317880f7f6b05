#pragma once
// Policies as Python objects.

#include <torch/csrc/python_headers.h>

#include "remat/policy.h"

namespace remat::python {

/// Returns the policy of an argument: a Policy, a Python function, or None. Throws python_error or
/// py::error_already_set for anything else.
Policy policy_in(PyObject* object);

}  // namespace remat::python
