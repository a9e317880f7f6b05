#pragma once
// Stands in for the Python interpreter of our entries and of our dispatch mode.

#include <c10/core/impl/PyInterpreter.h>

namespace remat::seam {

/// Returns the interpreter that all entries share. It is never destroyed, since entries may outlive
/// static destruction.
c10::impl::PyInterpreter* interpreter();

/// Returns the result of an interpreter's `detach` while our mode is the topmost: null for the
/// plain copy.
c10::intrusive_ptr<c10::TensorImpl> detached(const c10::TensorImpl* tensor);

}  // namespace remat::seam
