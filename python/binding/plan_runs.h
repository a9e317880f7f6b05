#pragma once
// Chains of Python functions that run as a plan says.

#include <ATen/core/Tensor.h>

#include <cstddef>

#include "python.h"
#include "remat/move.h"
#include "remat/options.h"
#include "remat/plan.h"

namespace remat::python {

/// Calls a stage with the lock held, and moves the caller's tensor on: no reference to it remains
/// here.
at::Tensor call_stage(PyObject* stage, std::size_t number, at::Tensor x, const char* verb);

/// Runs a plan on a tensor. Returns a new reference, or null with a Python error set.
PyObject* run_plan(const Plan& plan, const py::list& stages, const CheckpointOptions& options,
                   const MoveOptions& moving, at::Tensor input);

}  // namespace remat::python
