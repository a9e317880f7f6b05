#include "lib/device_rng.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>

#include <cstring>
#include <optional>

namespace remat {

namespace {

at::Tensor state_of(at::Generator& generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator& generator, const at::Tensor& state) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

bool is_same(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

std::optional<c10::DeviceType> accelerator() { return at::getAccelerator(/*checked=*/false); }

bool is_in_use(c10::DeviceType type, std::size_t index) {
  return at::globalContext().getAcceleratorHooksInterface(type).hasPrimaryContext(
      static_cast<c10::DeviceIndex>(index));
}

at::Generator generator_of(c10::DeviceType type, std::size_t index) {
  return at::globalContext().defaultGenerator(
      c10::Device(type, static_cast<c10::DeviceIndex>(index)));
}

}  // namespace

std::unique_ptr<DeviceRng> DeviceRng::take(c10::ArrayRef<at::Generator> registered) {
  const auto type = accelerator();
  auto kept = std::make_unique<DeviceRng>();
  for (at::Generator generator : registered)
    if (!generator.device().is_cpu()) kept->states_.push_back({generator, state_of(generator)});
  if (!type) return kept->is_empty() ? nullptr : std::move(kept);
  kept->was_used_.resize(static_cast<std::size_t>(at::accelerator::deviceCount()));
  for (std::size_t i = 0; i < kept->was_used_.size(); ++i) {
    kept->was_used_[i] = is_in_use(*type, i);
    if (!kept->was_used_[i]) continue;
    at::Generator generator = generator_of(*type, i);
    kept->states_.push_back({generator, state_of(generator)});
  }
  return kept;
}

void DeviceRng::settle() {
  std::erase_if(states_, [](State& each) { return is_same(each.state, state_of(each.generator)); });
  const auto type = accelerator();
  for (std::size_t i = 0; type && i < was_used_.size(); ++i) {
    if (was_used_[i] || !is_in_use(*type, i)) continue;
    // It stood at the beginning of the stream of its seed.
    at::Generator generator = generator_of(*type, i);
    at::Generator start = generator.clone();
    start.set_offset(0);
    states_.push_back({generator, state_of(start)});
  }
}

DeviceRngSwap::DeviceRngSwap(const DeviceRng* kept) {
  if (kept == nullptr) return;
  for (const DeviceRng::State& each : kept->states_) {
    at::Generator generator = each.generator;
    before_.push_back({generator, state_of(generator)});
    set_state(generator, each.state);
  }
}

DeviceRngSwap::~DeviceRngSwap() {
  for (DeviceRng::State& each : before_) set_state(each.generator, each.state);
}

}  // namespace remat
