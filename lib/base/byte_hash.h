#pragma once
// A 64-bit hash of bytes in memory, at the speed of memory.

#define XXH_INLINE_ALL  // nothing to link with
#include <xxhash.h>

#include <cstddef>
#include <cstdint>

namespace remat {

inline constexpr uint64_t odd_multiplier = 0x9e3779b97f4a7c15ULL;

inline uint64_t combine(uint64_t seed, uint64_t value) {
  return (seed ^ value) * odd_multiplier + (seed >> 29) + 1;
}

/// Returns the hash. With the standard library's, a step with `Values` took half as long again.
inline uint64_t hash_of_bytes(const char* bytes, std::size_t size) {
  return XXH3_64bits(bytes, size);
}

}  // namespace remat
