#pragma once
// Errors that need no region to be told: what LibTorch or this version cannot do.

#include <string>

namespace remat {

/// Throws CheckpointError of kind Unsupported: `fact` in past tense, then its cause and what to do,
/// none with a full stop.
[[noreturn]] void throw_unsupported(const std::string& fact, const std::string& cause,
                                    const std::string& advice);

}  // namespace remat
