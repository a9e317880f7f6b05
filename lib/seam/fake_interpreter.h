#pragma once
// What LibTorch takes for the Python interpreter of our entries and of our dispatch mode.

#include <c10/core/impl/PyInterpreter.h>

namespace remat::seam {

/// All entries share one interpreter; it is never destroyed, since they may outlive static
/// destruction.
c10::impl::PyInterpreter* interpreter();

/// What an interpreter's `detach` answers where our mode is the topmost: null for the plain copy.
c10::intrusive_ptr<c10::TensorImpl> detached(const c10::TensorImpl* tensor);

}  // namespace remat::seam
