#pragma once
// The place to which plans and budgets move tensors, in the form that Python programs give.

#include "fields.h"
#include "remat/move.h"

namespace remat::python {

/// A MoveOptions of remat/_plan.py.
inline MoveOptions moving_in(const py::object& moving) {
  return options_of<MoveOptions>(moving.attr("__dict__"), {REMAT_MEMBER(MoveOptions, directory),
                                                           REMAT_MEMBER(MoveOptions, min_bytes),
                                                           REMAT_MEMBER(MoveOptions, pin_memory)});
}

}  // namespace remat::python
