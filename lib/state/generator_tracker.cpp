// Definitions of state.h: generators with names, and forks of the default generator.

#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <set>
#include <utility>

#include "remat/state.h"

namespace remat {

namespace {

using States = std::map<std::string, at::Tensor>;

at::Generator default_generator(c10::Device device) {
  return at::globalContext().defaultGenerator(device);
}

at::Tensor locked_state(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_locked_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

States copies_of(const States& states) {
  States copies;
  for (const auto& [name, state] : states) copies.emplace(name, state.clone());
  return copies;
}

}  // namespace

struct GeneratorTracker::Impl {
  const c10::Device device;
  mutable std::mutex mutex{};  // guards the members below; no generator's mutex is taken under it
  States states{};
  std::set<std::string> forked{};
};

GeneratorTracker::GeneratorTracker(c10::Device device)
    : impl_(new Impl{device.is_cpu() || device.has_index()
                         ? device
                         : c10::impl::getDeviceGuardImpl(device.type())->getDevice()}) {}
GeneratorTracker::~GeneratorTracker() = default;

void GeneratorTracker::add(const std::string& name, uint64_t seed) {
  at::Generator made = default_generator(impl_->device).clone();
  made.set_current_seed(seed);
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  const bool is_new = impl_->states.emplace(name, made.get_state()).second;
  TORCH_CHECK_VALUE(is_new, "remat::GeneratorTracker: there was a generator \"", name,
                    "\" already. Hint: choose another name, or set_states to begin anew.");
}

States GeneratorTracker::states() const {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  return copies_of(impl_->states);
}

void GeneratorTracker::set_states(const States& states) {
  States copies = copies_of(states);
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  TORCH_CHECK(impl_->forked.empty(),
              "remat::GeneratorTracker: states were set within a fork. Hint: end it before.");
  impl_->states = std::move(copies);
}

// States are replaced and never written to, so that copies may share them.
std::any GeneratorTracker::capture() {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->states;
}

void GeneratorTracker::restore(const std::any& captured) {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  impl_->states = std::any_cast<const States&>(captured);
}

GeneratorForkGuard::GeneratorForkGuard(std::shared_ptr<GeneratorTracker> tracker, std::string name)
    : tracker_(std::move(tracker)), name_(std::move(name)), registered_(tracker_) {
  GeneratorTracker::Impl& all = *tracker_->impl_;
  at::Tensor named;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.states.find(name_);
    TORCH_CHECK_VALUE(found != all.states.end(), "remat::GeneratorForkGuard: there was no \"",
                      name_, "\" in the tracker. Hint: tracker.add(\"", name_, "\", seed) before.");
    TORCH_CHECK_VALUE(all.forked.insert(name_).second, "remat::GeneratorForkGuard: \"", name_,
                      "\" was forked already.\nCause: a fork inside a fork of the same name, a "
                      "fork on another thread, or a backward within a fork.\nHint: end that fork "
                      "before.");
    named = found->second;
  }
  at::Generator generator = default_generator(all.device);
  own_state_ = locked_state(generator);
  set_locked_state(generator, named);
}

GeneratorForkGuard::~GeneratorForkGuard() {
  GeneratorTracker::Impl& all = *tracker_->impl_;
  at::Generator generator = default_generator(all.device);
  at::Tensor named = locked_state(generator);
  set_locked_state(generator, own_state_);
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.states[name_] = std::move(named);
  all.forked.erase(name_);
}

}  // namespace remat
