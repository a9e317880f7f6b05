#pragma once
// Checks whether the host has memory for a copy.

#include <cstdint>

namespace remat {

/// Warns, once in the process, if `bytes` more would leave the host little memory. Reads the
/// kernel's numbers, which takes some microseconds: call it for new memory only.
void warn_if_host_is_short(int64_t bytes);

}  // namespace remat
