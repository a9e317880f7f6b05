#pragma once
// What LibTorch takes for the Python interpreter of our entries and of our dispatch mode.

#include <c10/core/impl/PyInterpreter.h>

namespace remat::seam {

/// One for all; never destroyed, since entries may outlive static destruction.
c10::impl::PyInterpreter* interpreter();

}  // namespace remat::seam
