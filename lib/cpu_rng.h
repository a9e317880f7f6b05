#pragma once
// The state of the default CPU generator, kept only where it is needed.

#include <ATen/CPUGeneratorImpl.h>

#include <memory>
#include <optional>

namespace remat {

struct CpuRngState {
  at::mt19937 engine;
  std::optional<float> next_float_normal;
  std::optional<double> next_double_normal;
};

/// The present state. Frames whose generator did not advance share one copy.
std::shared_ptr<const CpuRngState> share_cpu_rng_state();
/// Whether the generator stands where `state` was taken.
bool is_cpu_rng_at(const CpuRngState& state);
void set_cpu_rng_state(const CpuRngState& state);

}  // namespace remat
