#pragma once
// The state of the default CPU generator, kept only where it is needed.

#include <ATen/CPUGeneratorImpl.h>

#include <cstdint>
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
/// How often this library has set the generator in threads other than this one (which puts back
/// exactly what it found). Between two equal counts the generator only moved forward, by draws.
uint64_t num_foreign_rng_sets();
/// Where the generator stands, as a number: equal for equal states, and after a draw another one.
uint64_t cpu_rng_position();

/// Note [Disturbed draws]
/// The default generator is one for all threads. A recompute that sets it can be disturbed by any
/// other thread that draws, and a lock cannot prevent it: forwards draw without one, and none may
/// be held while user code runs that could wait for another engine thread. So each slot of a region
/// that draws notes where the generator stood. A recompute is disturbed if another thread set the
/// generator meanwhile, or if it meets another position than forward did; except that a recompute
/// during which the generator does not move at all belongs to a function that draws nothing: then
/// what moved it in forward was another thread. A disturbed one is repeated, and fails in the end
/// (Rule 11). Recomputes that draw take turns where that costs little: this guard waits a bounded
/// time for its turn and then goes on without.
class DrawingTurn {
 public:
  explicit DrawingTurn(bool draws);
  ~DrawingTurn();
  DrawingTurn(const DrawingTurn&) = delete;
  DrawingTurn& operator=(const DrawingTurn&) = delete;

 private:
  bool has_turn_ = false;
};

}  // namespace remat
