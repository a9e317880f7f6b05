#pragma once
// The state of a CPU generator: copied, compared and set without touching more of it than needed.

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
/// Returns null for one that is no such generator, though it may be on the CPU (a library's own
/// kind).
at::CPUGeneratorImpl* as_cpu_generator(const at::Generator& generator);

// Of each function the caller holds the generator's mutex, if another thread can reach it.

/// Copies the present state.
std::shared_ptr<const CpuRngState> state_of(at::CPUGeneratorImpl& generator);
/// Whether the generator stands where `state` was taken.
bool is_at(at::CPUGeneratorImpl& generator, const CpuRngState& state);
void set_state(at::CPUGeneratorImpl& generator, const CpuRngState& state);
void copy_state(at::CPUGeneratorImpl& from, at::CPUGeneratorImpl& to);

/// Where a generator stands: equal for equal states, and after a draw another one.
struct CpuRngPosition {
  uint64_t seed = 0;
  int left = 0;
  uint32_t next = 0;
  std::array<uint32_t, 4> first_words{};
  uint64_t normal_double = 0;
  uint64_t normal_float = 0;  ///< its bits, and above them whether there is one of either kind
  bool operator==(const CpuRngPosition&) const = default;
};
CpuRngPosition position_of(at::CPUGeneratorImpl& generator);
bool is_at(at::CPUGeneratorImpl& generator, const CpuRngPosition& position);

}  // namespace remat
