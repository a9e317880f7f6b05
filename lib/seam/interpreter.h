#pragma once
// Stands in for the Python interpreter of our entries and of our dispatch mode, or hooks into
// Python's own.
//
// Note [A mode that is Python's]
// A mode has an interpreter, and LibTorch hands an operator to the interpreter of the topmost mode.
// With an interpreter of our own we see operators natively. But for tensors whose class computes
// their sizes, and for operators of higher order, LibTorch assumes that the topmost mode is
// Python's: with ours, an assertion fails where nothing may be thrown.
//
// So if a binding gives us a Python object, a reference to that object is on the stack. Python's
// interpreter then gets a table of functions that forwards everything to its old table, except
// operators for which our mode is the topmost. The interpreter stays the same object, which is all
// that LibTorch compares.
//
// Rejected: a dispatch key of our own. Operators of higher order refuse unknown keys, and modes
// that the function opens inside the region would see operators after us.

#include <c10/core/impl/PyInterpreter.h>

namespace remat::seam {

/// Returns the interpreter that all entries share. It is never destroyed, since entries may outlive
/// static destruction.
c10::impl::PyInterpreter* interpreter();

/// Redirects operators that LibTorch hands to `python` to us if the topmost mode is ours. Any
/// thread.
void look_into(c10::impl::PyInterpreter& python);

}  // namespace remat::seam
