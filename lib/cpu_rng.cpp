#include "lib/cpu_rng.h"

#include <bit>
#include <type_traits>

namespace remat {

namespace {

// Note [Reading the position]
// Every region asks twice whether the generator moved, and the accessor of the engine copies 2.5 KB
// to say so. The explicit instantiation may name the private member; a LibTorch without it does
// not compile.
at::mt19937 at::CPUGeneratorImpl::* engine_member(at::CPUGeneratorImpl*);
template <at::mt19937 at::CPUGeneratorImpl::* member>
struct EngineAccess {
  friend at::mt19937 at::CPUGeneratorImpl::* engine_member(at::CPUGeneratorImpl*) { return member; }
};
template struct EngineAccess<&at::CPUGeneratorImpl::engine_>;

at::mt19937& engine_of(at::CPUGeneratorImpl& generator) {
  return generator.*engine_member(&generator);
}

/// The engine's only member, without a copy.
const at::mt19937_data_pod& data_of(const at::mt19937& engine) {
  static_assert(std::is_standard_layout_v<at::mt19937> &&
                sizeof(at::mt19937) == sizeof(at::mt19937_data_pod));
  return reinterpret_cast<const at::mt19937_data_pod&>(engine);
}

}  // namespace

at::CPUGeneratorImpl& default_cpu_generator() {
  static auto* const generator = at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>();
  return *generator;
}

at::CPUGeneratorImpl* as_cpu_generator(const at::Generator& generator) {
  return dynamic_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
}

bool is_at(at::CPUGeneratorImpl& generator, const CpuRngState& state) {
  const at::mt19937_data_pod& a = data_of(engine_of(generator));
  const at::mt19937_data_pod& b = data_of(state.engine);
  return a.left_ == b.left_ && a.next_ == b.next_ && a.seed_ == b.seed_ &&
         a.state_[0] == b.state_[0] && a.state_[1] == b.state_[1] && a.state_[2] == b.state_[2] &&
         a.state_[3] == b.state_[3] &&
         generator.next_float_normal_sample() == state.next_float_normal &&
         generator.next_double_normal_sample() == state.next_double_normal;
}

std::shared_ptr<const CpuRngState> state_of(at::CPUGeneratorImpl& generator) {
  return std::make_shared<const CpuRngState>(CpuRngState{engine_of(generator),
                                                         generator.next_float_normal_sample(),
                                                         generator.next_double_normal_sample()});
}

void set_state(at::CPUGeneratorImpl& generator, const CpuRngState& state) {
  engine_of(generator) = state.engine;
  generator.set_next_float_normal_sample(state.next_float_normal);
  generator.set_next_double_normal_sample(state.next_double_normal);
}

void copy_state(at::CPUGeneratorImpl& from, at::CPUGeneratorImpl& to) {
  engine_of(to) = engine_of(from);
  to.set_next_float_normal_sample(from.next_float_normal_sample());
  to.set_next_double_normal_sample(from.next_double_normal_sample());
}

// Every draw moves `left_` or `next_`; they come back to the same values only with a new block of
// state words, of which the first 128 bits are compared too.
CpuRngPosition position_of(at::CPUGeneratorImpl& generator) {
  const at::mt19937_data_pod& data = data_of(engine_of(generator));
  const auto pair = [](uint64_t high, uint64_t low) { return (high << 32) | low; };
  CpuRngPosition position{
      data.seed_, pair(static_cast<uint32_t>(data.left_), static_cast<uint32_t>(data.next_)),
      pair(data.state_[0], data.state_[1]), pair(data.state_[2], data.state_[3])};
  if (const auto normal = generator.next_float_normal_sample())
    position.normal_float = pair(1, std::bit_cast<uint32_t>(*normal));
  if (const auto normal = generator.next_double_normal_sample()) {
    position.normal_double = std::bit_cast<uint64_t>(*normal);
    position.normal_float |= pair(2, 0);
  }
  return position;
}

uint64_t seed_of(at::CPUGeneratorImpl& generator) { return data_of(engine_of(generator)).seed_; }

}  // namespace remat
