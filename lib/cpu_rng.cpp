#include "lib/cpu_rng.h"

#include <atomic>
#include <bit>
#include <chrono>
#include <mutex>
#include <thread>
#include <type_traits>

namespace remat {

namespace {

at::CPUGeneratorImpl& generator() {
  static auto* const impl = at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>();
  return *impl;
}

// Note [Reading the position]
// Every region asks twice whether the generator moved, and the accessor of the engine copies 2.5 KB
// to say so. The explicit instantiation may name the private member; a LibTorch without it does
// not compile.
at::mt19937 at::CPUGeneratorImpl::* engine_of(at::CPUGeneratorImpl*);
template <at::mt19937 at::CPUGeneratorImpl::* member>
struct EngineAccess {
  friend at::mt19937 at::CPUGeneratorImpl::* engine_of(at::CPUGeneratorImpl*) { return member; }
};
template struct EngineAccess<&at::CPUGeneratorImpl::engine_>;

/// The engine's only member, without a copy.
const at::mt19937_data_pod& data_of(const at::mt19937& engine) {
  static_assert(std::is_standard_layout_v<at::mt19937> &&
                sizeof(at::mt19937) == sizeof(at::mt19937_data_pod));
  return reinterpret_cast<const at::mt19937_data_pod&>(engine);
}

/// Whether no number was drawn since `state` was taken. Every draw moves `left_` or `next_`; they come back to the same values only with a new block of state words, of which the first 128 bits are compared too. The caller holds the generator's lock.
bool is_at(at::CPUGeneratorImpl& impl, const CpuRngState& state) {
  const at::mt19937_data_pod& a = data_of(impl.*engine_of(&impl));
  const at::mt19937_data_pod& b = data_of(state.engine);
  return a.left_ == b.left_ && a.next_ == b.next_ && a.seed_ == b.seed_ &&
         a.state_[0] == b.state_[0] && a.state_[1] == b.state_[1] && a.state_[2] == b.state_[2] &&
         a.state_[3] == b.state_[3] && impl.next_float_normal_sample() == state.next_float_normal &&
         impl.next_double_normal_sample() == state.next_double_normal;
}

}  // namespace

std::shared_ptr<const CpuRngState> share_cpu_rng_state() {
  thread_local std::shared_ptr<const CpuRngState> latest;
  at::CPUGeneratorImpl& impl = generator();
  std::lock_guard<std::mutex> lock(impl.mutex_);
  if (latest == nullptr || !is_at(impl, *latest))
    latest = std::make_shared<const CpuRngState>(CpuRngState{
        impl.engine(), impl.next_float_normal_sample(), impl.next_double_normal_sample()});
  return latest;
}

bool is_cpu_rng_at(const CpuRngState& state) {
  at::CPUGeneratorImpl& impl = generator();
  std::lock_guard<std::mutex> lock(impl.mutex_);
  return is_at(impl, state);
}

uint64_t cpu_rng_position() {
  at::CPUGeneratorImpl& impl = generator();
  std::lock_guard<std::mutex> lock(impl.mutex_);
  const at::mt19937_data_pod& data = data_of(impl.*engine_of(&impl));
  const auto mix = [](uint64_t seed, uint64_t word) {
    seed = (seed ^ word) * 0x9e3779b97f4a7c15ULL;
    return seed ^ (seed >> 32);
  };
  uint64_t position = mix(
      data.seed_, (static_cast<uint64_t>(data.next_) << 32) | static_cast<uint32_t>(data.left_));
  position = mix(position, (static_cast<uint64_t>(data.state_[0]) << 32) | data.state_[1]);
  position = mix(position, (static_cast<uint64_t>(data.state_[2]) << 32) | data.state_[3]);
  if (const auto normal = impl.next_float_normal_sample())
    position = mix(position, 1 + std::bit_cast<uint32_t>(*normal));
  if (const auto normal = impl.next_double_normal_sample())
    position = mix(position, 2 + std::bit_cast<uint64_t>(*normal));
  return position;
}

namespace {
std::atomic<uint64_t> num_sets{0};
thread_local uint64_t num_own_sets = 0;
std::mutex drawing;
thread_local int turns_of_this_thread = 0;
}  // namespace

DrawingTurn::DrawingTurn(bool draws) {
  if (!draws) return;
  constexpr int max_tries = 100;
  for (int i = 0; turns_of_this_thread == 0 && !drawing.try_lock(); ++i) {
    if (i == max_tries) return;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  has_turn_ = true;
  ++turns_of_this_thread;
}

DrawingTurn::~DrawingTurn() {
  if (has_turn_ && --turns_of_this_thread == 0) drawing.unlock();
}

uint64_t num_foreign_rng_sets() { return num_sets.load() - num_own_sets; }

void set_cpu_rng_state(const CpuRngState& state) {
  at::CPUGeneratorImpl& impl = generator();
  std::lock_guard<std::mutex> lock(impl.mutex_);
  num_sets.fetch_add(1);
  ++num_own_sets;
  impl.set_engine(state.engine);
  impl.set_next_float_normal_sample(state.next_float_normal);
  impl.set_next_double_normal_sample(state.next_double_normal);
}

}  // namespace remat
