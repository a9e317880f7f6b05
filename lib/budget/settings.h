#pragma once
// Settings of the process that decide what an operator's kernel computes.

#include <cstdint>

namespace remat::budget {

/// Returns the default dtype, the number of threads, and whether oneDNN and deterministic
/// algorithms are on, as one number.
uint32_t settings_now();

/// Returns the name of a setting that differs between two such numbers: "the default dtype".
const char* difference_of_settings(uint32_t a, uint32_t b);

}  // namespace remat::budget
