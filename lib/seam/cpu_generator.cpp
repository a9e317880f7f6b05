#include "lib/seam/cpu_generator.h"

#include <bit>
#include <cstring>
#include <type_traits>

namespace remat {

namespace {

// Note [Reading the position]
// Every region checks four times whether the generator moved, and the accessor of the engine copies
// 2.5 KB. So private members are read. The explicit instantiations may name them; a LibTorch
// without them does not compile.
template <class Member>
using MemberOf = Member at::CPUGeneratorImpl::*;
MemberOf<at::mt19937> member(at::mt19937*);
MemberOf<std::optional<float>> member(std::optional<float>*);
MemberOf<std::optional<double>> member(std::optional<double>*);
template <class Member, MemberOf<Member> named>
struct Access {
  friend MemberOf<Member> member(Member*) { return named; }
};
template struct Access<at::mt19937, &at::CPUGeneratorImpl::engine_>;
template struct Access<std::optional<float>, &at::CPUGeneratorImpl::next_float_normal_sample_>;
template struct Access<std::optional<double>, &at::CPUGeneratorImpl::next_double_normal_sample_>;

template <class Member>
Member& part_of(at::CPUGeneratorImpl& generator) {
  return generator.*member(static_cast<Member*>(nullptr));
}

at::mt19937& engine_of(at::CPUGeneratorImpl& generator) { return part_of<at::mt19937>(generator); }

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

// Every draw changes `left_` or `next_`. They return to the same values only with a new block of
// state words, of which the first 128 bits are compared too.
CpuRngPosition position_of(at::CPUGeneratorImpl& generator) {
  const at::mt19937_data_pod& data = data_of(engine_of(generator));
  CpuRngPosition position{.seed = data.seed_, .left = data.left_, .next = data.next_};
  std::memcpy(&position.first_words, data.state_.data(), sizeof position.first_words);
  const auto pair = [](uint64_t high, uint64_t low) { return (high << 32) | low; };
  if (const auto& normal = part_of<std::optional<float>>(generator))
    position.normal_float = pair(1, std::bit_cast<uint32_t>(*normal));
  if (const auto& normal = part_of<std::optional<double>>(generator)) {
    position.normal_double = std::bit_cast<uint64_t>(*normal);
    position.normal_float |= pair(2, 0);
  }
  return position;
}

bool is_at(at::CPUGeneratorImpl& generator, const CpuRngPosition& position) {
  if (part_of<std::optional<float>>(generator) || part_of<std::optional<double>>(generator))
    return position_of(generator) == position;
  const at::mt19937_data_pod& data = data_of(engine_of(generator));
  return position.normal_float == 0 && data.left_ == position.left && data.next_ == position.next &&
         data.seed_ == position.seed &&
         std::memcmp(data.state_.data(), &position.first_words, sizeof position.first_words) == 0;
}

}  // namespace remat
