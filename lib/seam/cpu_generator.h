#pragma once
// Copies, compares and sets the state of a CPU generator, touching no more of it than needed.

#include <ATen/CPUGeneratorImpl.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>

namespace remat {

struct CpuRngState {
  at::mt19937 engine;
  std::optional<float> next_float_normal;
  std::optional<double> next_double_normal;
};

at::CPUGeneratorImpl& default_cpu_generator();
/// Returns null for another kind of generator, which may also be on the CPU (a library's own).
at::CPUGeneratorImpl* as_cpu_generator(const at::Generator& generator);

// For each function the caller holds the generator's mutex if another thread can reach the
// generator.

/// Copies the present state.
std::shared_ptr<const CpuRngState> state_of(at::CPUGeneratorImpl& generator);
/// Returns whether the generator is at the position where `state` was taken.
bool is_at(at::CPUGeneratorImpl& generator, const CpuRngState& state);
void set_state(at::CPUGeneratorImpl& generator, const CpuRngState& state);
void copy_state(at::CPUGeneratorImpl& from, at::CPUGeneratorImpl& to);

/// The position of a generator: equal for equal states, and different after a draw.
struct CpuRngPosition {
  uint64_t seed = 0;
  int left = 0;
  uint32_t next = 0;
  std::array<uint32_t, 4> first_words{};
  uint64_t normal_double = 0;
  uint64_t normal_float = 0;  ///< its bits; above them, which of the two kinds exist
  bool operator==(const CpuRngPosition&) const = default;
};
CpuRngPosition position_of(at::CPUGeneratorImpl& generator);
bool is_at(at::CPUGeneratorImpl& generator, const CpuRngPosition& position);

}  // namespace remat
