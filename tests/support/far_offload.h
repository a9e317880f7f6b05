#pragma once
// Offloading from the stand-in of tests/device/stand_in.h, and sizes of the chunks of page-locked
// memory that copies from and to ordinary memory go through.

#include <algorithm>
#include <string>
#include <vector>

#include "tests/device/offload_cases.h"
#include "tests/device/stand_in.h"

namespace remat::testing {

inline const offload::Accelerator far_device{stand_in::device(),
                                             [] { return stand_in::live_bytes(); }};

/// Bytes for two page-locked chunks, whose size is the library's, and for nothing else.
inline constexpr int64_t two_chunks = 2 * (4 << 20);
inline constexpr int64_t over_two_chunks = 9'000'000;  ///< bytes

/// The number of texts with `part` in them.
inline int64_t count_of(const std::vector<std::string>& texts, const char* part) {
  return std::count_if(texts.begin(), texts.end(), [&](const std::string& each) {
    return each.find(part) != std::string::npos;
  });
}

}  // namespace remat::testing
