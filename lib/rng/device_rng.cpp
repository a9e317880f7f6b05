#include "lib/rng/device_rng.h"

#include <ATen/Context.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "lib/base/error.h"
#include "lib/rng/device_claims.h"
#include "lib/seam/accelerator.h"
#include "lib/seam/cpu_generator.h"

namespace remat {

namespace {

at::Tensor state_of(at::Generator& generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

/// Throws during a graph capture. The numbers of a captured graph depend on the state of its
/// generator at each replay, and forward and backward may be captured in separate graphs.
void refuse_capture(const c10::Device& device, const at::Generator& generator) {
  if (device.type() != present_accelerator() || !is_capturing(device, generator)) return;
  throw_unsupported(
      "a region that keeps the random state of its device is captured in a graph",
      "a captured graph draws new numbers at each replay, so a recompute could draw other "
      "numbers than its forward",
      "set preserve_rng_state = false if the function draws no random numbers; otherwise call it "
      "without a region in the captured part");
}

void set_state(at::Generator& generator, const at::Tensor& state) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

bool is_same(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

std::vector<const void*> subjects_of(const std::vector<GeneratorState>& states) {
  std::vector<const void*> generators;
  for (const GeneratorState& each : states) {
    refuse_capture(each.generator.device(), each.generator);
    generators.push_back(each.generator.unsafeGetGeneratorImpl());
  }
  return generators;
}

}  // namespace

std::unique_ptr<DeviceRng> DeviceRng::take(c10::ArrayRef<at::Generator> registered) {
  const bool has_others = std::any_of(registered.begin(), registered.end(), [](const auto& each) {
    return as_cpu_generator(each) == nullptr;
  });
  if (!has_others && !present_accelerator()) return nullptr;
  auto kept = std::make_unique<DeviceRng>();
  for (at::Generator generator : registered) {
    if (as_cpu_generator(generator) != nullptr) continue;
    kept->states_.push_back({generator, state_of(generator)});
    kept->registered_.push_back(generator);
  }
  kept->used_before_ = devices_in_use();
  for (const c10::Device& device : kept->used_before_) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    refuse_capture(device, generator);
    if (!kept->has(generator)) kept->states_.push_back({generator, state_of(generator)});
  }
  return kept;
}

const GeneratorState* DeviceRng::find(const at::Generator& generator) const {
  const auto found = std::find_if(states_.begin(), states_.end(), [&](const GeneratorState& each) {
    return each.generator == generator;
  });
  return found == states_.end() ? nullptr : &*found;
}

bool DeviceRng::is_others(const at::Generator& generator, const DevicesMet& met) const {
  const auto known = std::find(registered_.begin(), registered_.end(), generator);
  return known == registered_.end() && !met.has(generator.device()) &&
         is_claimed_by_others(generator.device());
}

void DeviceRng::add(std::unique_ptr<DeviceRng>& kept, const at::Generator& registered) {
  if (as_cpu_generator(registered) != nullptr) return;
  if (!kept) kept = std::make_unique<DeviceRng>();
  at::Generator generator = registered;
  if (!kept->has(generator)) kept->states_.push_back({generator, state_of(generator)});
  kept->registered_.push_back(generator);
}

std::vector<GeneratorState> DeviceRng::now() const {
  std::vector<GeneratorState> states;
  for (const GeneratorState& each : states_) states.push_back(present(each.generator));
  for (const c10::Device& device : devices_in_use())
    if (const at::Generator generator = at::globalContext().defaultGenerator(device);
        !has(generator))
      states.push_back(present(generator));
  return states;
}

std::vector<GeneratorState> DeviceRng::moved(const std::vector<GeneratorState>& before,
                                             std::vector<GeneratorState> now,
                                             const DevicesMet& met) {
  std::erase_if(now, [&](const GeneratorState& each) {
    const auto earlier = std::find_if(before.begin(), before.end(), [&](const GeneratorState& one) {
      return one.generator == each.generator;
    });
    // A generator that was registered since is compared with its state at that time.
    const GeneratorState* const then = earlier == before.end() ? find(each.generator) : &*earlier;
    return (then != nullptr && is_same(then->state, each.state)) || is_others(each.generator, met);
  });
  std::lock_guard<std::mutex> lock(mutex_);  // a backward inside the region may add, too
  for (const GeneratorState& each : now)
    if (!has_moved(each.generator)) moved_inside_.push_back(each.generator);
  return now;
}

GeneratorState DeviceRng::present(at::Generator generator) {
  return {generator, state_of(generator)};
}

void DeviceRng::set(const std::vector<GeneratorState>& states) {
  for (const GeneratorState& each : states) {
    at::Generator generator = each.generator;
    set_state(generator, each.state);
  }
}

bool DeviceRng::has_moved(const at::Generator& generator) const {
  return std::find(moved_inside_.begin(), moved_inside_.end(), generator) != moved_inside_.end();
}

void DeviceRng::settle(const DevicesMet& met) {
  states_ = at_begin(met);
  std::erase_if(states_, [&](GeneratorState& each) {
    return is_same(each.state, state_of(each.generator)) && !has_moved(each.generator);
  });
  moved_inside_ = {};
  is_settled_ = true;
}

std::vector<GeneratorState> DeviceRng::at_begin(const DevicesMet& met) const {
  std::vector<GeneratorState> states = states_;
  if (is_settled_) return states;
  std::unique_lock<std::mutex> lock(mutex_);
  std::erase_if(states, [&](const GeneratorState& each) {
    return !has_moved(each.generator) && is_others(each.generator, met);
  });
  lock.unlock();
  for (const c10::Device& device : devices_in_use()) {
    if (std::find(used_before_.begin(), used_before_.end(), device) != used_before_.end()) continue;
    // A generator first used inside was at the beginning of its seed's stream.
    at::Generator generator = at::globalContext().defaultGenerator(device);
    if (has(generator) || is_others(generator, met)) continue;
    at::Generator start = generator.clone();
    start.set_offset(0);
    states.push_back({generator, state_of(start)});
  }
  return states;
}

DeviceRngSwap::DeviceRngSwap(const std::vector<GeneratorState>& at_begin, const LockOwner& owner)
    : hold_(subjects_of(at_begin), owner, std::chrono::seconds(60)) {
  if (has_failed()) return;
  for (const GeneratorState& each : at_begin)  // may throw, so it comes before anything is set
    before_.push_back(DeviceRng::present(each.generator));
  DeviceRng::set(at_begin);
}

DeviceRngSwap::~DeviceRngSwap() {
  for (GeneratorState& each : before_) set_state(each.generator, each.state);
}

}  // namespace remat
