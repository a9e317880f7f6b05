#pragma once
// The open findings of the fuzzer, from a file: seeds with a known disagreement.

#include <cstdint>
#include <string>
#include <vector>

namespace fuzz {

struct KnownFinding {
  std::vector<std::string> topics;  // flags, sorted: "--selective"
  std::vector<uint64_t> seeds;
  std::string text;
};

/// Reads tests/fuzz/known.txt. Throws std::runtime_error for a line that it cannot read.
std::vector<KnownFinding> known_findings();

/// Returns the text of a seed's known finding under these topics, which are sorted; empty: none.
std::string known_text(const std::vector<std::string>& topics, uint64_t seed);

}  // namespace fuzz
