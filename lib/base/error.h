#pragma once
// Errors without a region: for functions that LibTorch or this version does not support.

#include <string>

namespace remat {

/// Throws CheckpointError of kind Unsupported: `fact` in the past tense, then its cause and a hint,
/// all without a full stop.
[[noreturn]] void throw_unsupported(const std::string& fact, const std::string& cause,
                                    const std::string& advice);

}  // namespace remat
