#pragma once
// What LibTorch takes for the Python interpreter of our entries and of our dispatch mode.

#include <c10/core/impl/PyInterpreter.h>

namespace remat::seam {

/// All entries share one interpreter; it is never destroyed, since they may outlive static
/// destruction.
c10::impl::PyInterpreter* interpreter();

}  // namespace remat::seam
