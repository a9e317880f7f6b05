#pragma once
// Process-wide defaults of options, from text: REMAT_OPTIONS, or set by the program.

#include <optional>

#include "remat/options.h"

namespace remat {

/// Returns `given` with the defaults of the process where it has built-in values; empty if the
/// process has no defaults. Throws `c10::ValueError` for a REMAT_OPTIONS that is not valid.
std::optional<CheckpointOptions> with_default_options(const CheckpointOptions& given);

}  // namespace remat
