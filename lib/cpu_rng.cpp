#include "lib/cpu_rng.h"

#include <mutex>
#include <type_traits>

namespace remat {

namespace {

at::CPUGeneratorImpl& generator() {
  static auto* const impl = at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>();
  return *impl;
}

CpuRngState read() {
  at::CPUGeneratorImpl& impl = generator();
  std::lock_guard<std::mutex> lock(impl.mutex_);
  return {impl.engine(), impl.next_float_normal_sample(), impl.next_double_normal_sample()};
}

/// The engine's only member, without the 2.5 KB copy that its accessor makes.
const at::mt19937_data_pod& data_of(const at::mt19937& engine) {
  static_assert(std::is_standard_layout_v<at::mt19937> &&
                sizeof(at::mt19937) == sizeof(at::mt19937_data_pod));
  return reinterpret_cast<const at::mt19937_data_pod&>(engine);
}

}  // namespace

// Every draw moves `left_` or `next_`; they come back to the same values only with a new block of
// state words, of which the first 128 bits are compared too.
bool CpuRngState::is_same_position(const CpuRngState& other) const {
  const at::mt19937_data_pod& a = data_of(engine);
  const at::mt19937_data_pod& b = data_of(other.engine);
  return a.left_ == b.left_ && a.next_ == b.next_ && a.seed_ == b.seed_ &&
         a.state_[0] == b.state_[0] && a.state_[1] == b.state_[1] && a.state_[2] == b.state_[2] &&
         a.state_[3] == b.state_[3] && next_float_normal == other.next_float_normal &&
         next_double_normal == other.next_double_normal;
}

std::shared_ptr<const CpuRngState> share_cpu_rng_state() {
  thread_local std::shared_ptr<const CpuRngState> latest;
  CpuRngState now = read();
  if (latest == nullptr || !latest->is_same_position(now))
    latest = std::make_shared<const CpuRngState>(now);
  return latest;
}

bool is_cpu_rng_at(const CpuRngState& state) { return state.is_same_position(read()); }

void set_cpu_rng_state(const CpuRngState& state) {
  at::CPUGeneratorImpl& impl = generator();
  std::lock_guard<std::mutex> lock(impl.mutex_);
  impl.set_engine(state.engine);
  impl.set_next_float_normal_sample(state.next_float_normal);
  impl.set_next_double_normal_sample(state.next_double_normal);
}

}  // namespace remat
