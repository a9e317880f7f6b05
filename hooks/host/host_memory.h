#pragma once
// Whether the host has memory for what is about to be copied to it.

#include <cstdint>

namespace remat {

/// Warns, once in the process, if the host would have little left beside so many bytes more. What
/// the kernel says is asked, which takes some microseconds: for memory that is new.
void warn_if_host_is_short(int64_t bytes);

}  // namespace remat
