#pragma once
// A 64-bit hash of bytes in memory, at the speed of memory.

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

namespace remat {

inline constexpr uint64_t odd_multiplier = 0x9e3779b97f4a7c15ULL;

inline uint64_t combine(uint64_t seed, uint64_t value) {
  return (seed ^ value) * odd_multiplier + (seed >> 29) + 1;
}

/// Returns the hash. Eight independent lanes make memory the bottleneck: with the standard
/// library's hash, one chain of multiplications, a step with `Values` took half as long again.
inline uint64_t hash_of_bytes(const char* bytes, std::size_t size) {
  constexpr std::size_t num_lanes = 8, block = num_lanes * sizeof(uint64_t);
  std::array<uint64_t, num_lanes> lanes{};
  for (std::size_t i = 0; i < num_lanes; ++i) lanes[i] = combine(odd_multiplier, i);
  const auto mix = [&lanes](const char* from) {
    std::array<uint64_t, num_lanes> words;
    std::memcpy(words.data(), from, block);
    for (std::size_t i = 0; i < num_lanes; ++i)
      lanes[i] = std::rotl((lanes[i] ^ words[i]) * odd_multiplier, 29);
  };
  std::size_t done = 0;
  for (; done + block <= size; done += block) mix(bytes + done);
  if (done < size) {
    std::array<char, block> rest{};
    std::memcpy(rest.data(), bytes + done, size - done);
    mix(rest.data());
  }
  uint64_t hash = size;
  for (const uint64_t lane : lanes) hash = std::rotl(combine(hash, lane), 31);
  return hash;
}

}  // namespace remat
