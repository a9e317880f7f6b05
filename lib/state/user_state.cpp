#include "lib/state/user_state.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "lib/base/planted_fault.h"
#include "lib/rng/draws.h"
#include "lib/scope/region_scope.h"
#include "lib/seam/warn.h"
#include "lib/state/buffer.h"

namespace remat {

namespace {

using detail::Ability;

/// The scope of a guard of state.h, with its registrations.
class StateScope final : public detail::Scope {
 public:
  explicit StateScope(std::shared_ptr<const UserRegistrations> registrations)
      : registrations_(std::move(registrations)) {
    answers(Ability::State);
  }
  std::shared_ptr<const UserRegistrations> registered_state() const override {
    return registrations_;
  }

 private:
  const std::shared_ptr<const UserRegistrations> registrations_;
};

std::shared_ptr<UserRegistrations> only(std::shared_ptr<StateProvider> provider) {
  TORCH_CHECK_VALUE(provider != nullptr,
                    "remat::StateProviderGuard: the provider is null. Hint: pass a provider.");
  auto all = std::make_shared<UserRegistrations>();
  all->providers.push_back(std::move(provider));
  return all;
}

std::shared_ptr<UserRegistrations> only(at::Generator generator) {
  TORCH_CHECK_VALUE(generator.defined(),
                    "remat::GeneratorGuard: the generator is not defined. Hint: pass a "
                    "generator, such as one from at::make_generator.");
  auto all = std::make_shared<UserRegistrations>();
  all->generators.push_back(std::move(generator));
  return all;
}

std::shared_ptr<UserRegistrations> only(RecomputeObserver observer) {
  auto all = std::make_shared<UserRegistrations>();
  all->observers.push_back(std::make_shared<const RecomputeObserver>(std::move(observer)));
  return all;
}

template <class T>
bool contains(const std::vector<T>& all, const T& one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

/// Returns a provider's state as a region begins.
std::any state_at_begin(StateProvider& provider) {
  const OutsideOfRegions outside;
  auto* const buffer = dynamic_cast<Buffer*>(&provider);
  return buffer != nullptr ? buffer->note() : provider.capture();
}

/// The starts with which recomputes of a module's regions left forward's contents. Only a hint,
/// since the contents are always compared: an address may belong to another module by now.
class StartsOfModules {
 public:
  bool from_end(const void* module) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return from_end_.contains(module);
  }
  void note(const void* module, StartsFrom start) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (start == StartsFrom::Begin) {
      from_end_.erase(module);
    } else if (from_end_.size() < max_known) {
      from_end_.insert(module);
    }
  }

 private:
  static constexpr std::size_t max_known = 10'000;
  std::mutex mutex_;
  std::unordered_set<const void*> from_end_;
};

StartsOfModules& starts_of_modules() {
  static auto* const all = new StartsOfModules;  // leaked: recomputes may run in static destructors
  return *all;
}

/// Returns the module that identifies the regions.
const void* subject_of(const UserRegistrations& registered) {
  return registered.flags.empty() ? nullptr : registered.flags.back()->subject();
}

}  // namespace

StateProvider::~StateProvider() = default;

std::shared_ptr<detail::Scope> scope_that_registers(
    std::shared_ptr<const UserRegistrations> registrations) {
  return std::make_shared<StateScope>(std::move(registrations));
}

// Handles a guard that is opened inside regions, as by a module that guards its own state: their
// recomputes need it too.
void tell_regions_around(const UserRegistrations& registrations) {
  std::vector<GuardWatcher*> first_runs;
  GuardWatcher* recompute = nullptr;  // one at most on a thread's stack
  detail::visit_regions([&](detail::RegionScope& scope) {
    GuardWatcher* const watcher = scope.guards();
    if (watcher == nullptr) return;
    if (scope.is_recompute)
      recompute = scope.is_own_thread() ? watcher : nullptr;
    else
      first_runs.push_back(watcher);
  });
  std::vector<std::any> states;
  for (std::size_t i = 0; !first_runs.empty() && i < registrations.providers.size(); ++i)
    states.push_back(state_at_begin(*registrations.providers[i]));
  for (GuardWatcher* const each : first_runs) each->guard_opened(registrations, states);
  if (recompute != nullptr) recompute->guard_opened(registrations, {});
}

StateProviderGuard::StateProviderGuard(std::shared_ptr<StateProvider> provider)
    : ScopeGuard(scope_that_registers(only(provider))) {
  tell_regions_around(*only(std::move(provider)));
}

GeneratorGuard::GeneratorGuard(at::Generator generator)
    : ScopeGuard(scope_that_registers(only(generator))) {
  tell_regions_around(*only(std::move(generator)));
}

RecomputeObserverGuard::RecomputeObserverGuard(RecomputeObserver observer)
    : ScopeGuard(scope_that_registers(only(std::move(observer)))) {}

void UserRegistrations::add(const UserRegistrations& other) {
  for (const auto& provider : other.providers) add(provider);
  for (const auto& each : other.flags) add(each);
  for (const at::Generator& generator : other.generators) add(generator);
  observers.insert(observers.end(), other.observers.begin(), other.observers.end());
  if (!other.running.expired()) running = other.running;
}

void UserRegistrations::add(const std::shared_ptr<StateProvider>& provider) {
  if (!contains(providers, provider)) providers.push_back(provider);
}

void UserRegistrations::add(const std::shared_ptr<TrainingFlags>& added) {
  for (const auto& known : flags)
    if (known->subject() == added->subject()) return;
  flags.push_back(added);
}

void UserRegistrations::add(const at::Generator& generator) {
  if (!contains(generators, generator)) generators.push_back(generator);
}

std::shared_ptr<const UserRegistrations> UserRegistrations::around(
    const std::shared_ptr<const UserRegistrations>& own) {
  if (detail::innermost(Ability::State) == nullptr) return own;
  c10::SmallVector<std::shared_ptr<const UserRegistrations>, 4> each;  // innermost first
  if (own != nullptr) each.push_back(own);
  detail::visit(Ability::State,
                [&](detail::Scope& scope) { each.push_back(scope.registered_state()); });
  if (each.size() == 1) return each.front();
  auto all = std::make_shared<UserRegistrations>();
  for (auto one = each.rbegin(); one != each.rend(); ++one) all->add(**one);
  return all;
}

UserState::UserState(std::shared_ptr<const UserRegistrations> registered, bool preserves_rng)
    : registered_(std::move(registered)) {
  captured_.reserve(registered_->providers.size());
  for (const auto& provider : registered_->providers)
    captured_.push_back({state_at_begin(*provider), {}, false});
  if (registered_->generators.empty()) return;
  const auto generators = std::exchange(to_change().generators, {});
  if (!preserves_rng) return;
  for (const at::Generator& generator : generators) keep(generator);
}

UserRegistrations& UserState::to_change() {
  if (registered_.use_count() > 1) registered_ = std::make_shared<UserRegistrations>(*registered_);
  return const_cast<UserRegistrations&>(*registered_);  // the object itself is never const
}

void UserState::keep(const std::shared_ptr<StateProvider>& provider, const std::any& state) {
  const auto& known = registered_->providers;
  const auto pointer_at = [&](std::size_t place) { return known[place].get(); };
  if (places_.find(provider.get(), known.size(), pointer_at) >= 0) return;
  to_change().providers.push_back(provider);
  captured_.push_back({state, {}, false});
}

void UserState::keep(const at::Generator& generator) {
  UserRegistrations& own = to_change();
  const std::size_t known = own.generators.size();
  own.add(generator);
  at::CPUGeneratorImpl* const impl = as_cpu_generator(generator);
  if (own.generators.size() == known || impl == nullptr || impl == &default_cpu_generator()) return;
  draw_logs_.push_back(std::make_unique<DrawLog>(*impl));
  draw_logs_.back()->begin();
}

bool UserState::has_users_providers() const {
  return std::any_of(registered_->providers.begin(), registered_->providers.end(),
                     [](const auto& provider) { return is_users(*provider); });
}

std::vector<std::any> UserState::states_now() const {
  std::vector<std::any> states;
  states.reserve(registered_->providers.size());
  for (const auto& provider : registered_->providers) {
    const OutsideOfRegions outside;
    states.push_back(provider->capture());
  }
  return states;
}

void UserState::settle() {
  // Recomputes find a buffer that the function added as the function left it.
  const std::size_t num_known = registered_->providers.size();
  std::size_t next = 0;  // place of the expected next buffer, if the function added none
  const auto is_of = [](const auto& provider, const at::Tensor& tensor) {
    const auto* const buffer = dynamic_cast<const Buffer*>(provider.get());
    return buffer != nullptr && buffer->tensor().is_same(tensor);
  };
  for (const auto& flags : registered_->flags)
    flags->visit_buffers([&](const at::Tensor& tensor) {
      auto& known = registered_->providers;
      if (next < known.size() && is_of(known[next], tensor)) {
        ++next;
        return;
      }
      const auto found = std::find_if(known.begin(), known.end(),
                                      [&](const auto& each) { return is_of(each, tensor); });
      next = static_cast<std::size_t>(found - known.begin()) + 1;
      if (found == known.end()) keep(Buffer::of(tensor, nullptr), {});
    });
  if (captured_.empty()) return;
  const bool is_inner = detail::innermost(Ability::Region) != nullptr;
  const OutsideOfRegions outside;
  for (std::size_t i = 0; i < captured_.size(); ++i) {
    auto* const buffer = dynamic_cast<Buffer*>(registered_->providers[i].get());
    if (buffer == nullptr) continue;
    Captured& captured = captured_[i];
    if (i >= num_known) {
      captured.begin = captured.left = buffer->capture();
      continue;
    }
    const Written written = buffer->written_since(captured.begin, is_inner);
    if (written == Written::Not && !is_planted(Fault::BufferKept)) {
      captured.is_touched = buffer->is_moved_since(captured.begin);
      captured.begin.reset();
    }
    if (written != Written::Otherwise) continue;
    has_begin_ = has_begin_ && buffer->has_contents(captured.begin);
    captured.left = buffer->capture();
    is_compared_ = true;
  }
  for (const auto& flags : registered_->flags)
    if (flags->has_replaced_buffers()) is_compared_ = has_replaced_ = true;
}

c10::SmallVector<StartsFrom, 2> UserState::starts() const {
  if (is_planted(Fault::BufferStart)) return {StartsFrom::Begin};
  if (!has_begin_) return {StartsFrom::End};
  if (starts_of_modules().from_end(subject_of(*registered_)))
    return {StartsFrom::End, StartsFrom::Begin};
  return {StartsFrom::Begin, StartsFrom::End};
}

void UserState::remember(StartsFrom start) const {
  if (has_begin_) starts_of_modules().note(subject_of(*registered_), start);
}

UserState::~UserState() = default;

ObservedRecompute::ObservedRecompute(const UserState* state, const RegionInfo& region)
    : state_(state) {
  if (state_ == nullptr || state_->registered().observers.empty()) return;
  phase_ = {Phase::Recompute, region.id, region.depth, region.name()};
  try {
    for (const auto& observer : state_->registered().observers) {
      const OutsideOfRegions outside;
      if (observer->begin) observer->begin(phase_);
      ++num_told_;
    }
  } catch (...) {
    tell_end();
    throw;
  }
}

ObservedRecompute::~ObservedRecompute() { tell_end(); }

void ObservedRecompute::tell_end() noexcept {
  while (num_told_ > 0) {
    const RecomputeObserver& observer = *state_->registered().observers[--num_told_];
    try {
      const OutsideOfRegions outside;
      if (observer.end) observer.end(phase_);
    } catch (const std::exception& e) {
      seam::warn(c10::str("remat: an exception from a RecomputeObserver's end was ignored: ",
                          seam::text_of(e)));
    } catch (...) {
      seam::warn("remat: an exception from a RecomputeObserver's end was ignored");
    }
  }
}

std::vector<const void*> UserRestore::restored_by(const UserState* state) {
  std::vector<const void*> all;
  if (state == nullptr) return all;
  for (std::size_t i = 0; i < state->captured_.size(); ++i)
    if (state->captured_[i].begin.has_value() || state->captured_[i].is_touched)
      all.push_back(state->registered_->providers[i].get());
  return all;
}

UserRestore::UserRestore(const UserState* state, const LockOwner& owner,
                         const std::vector<at::Tensor>& captured, StartsFrom start)
    : state_(state),
      start_(start),
      hold_(restored_by(state), owner, std::chrono::seconds(10)),
      has_failed_(hold_.has_failed()) {
  if (state_ == nullptr || has_failed_) return;
  if (!captured.empty()) watched_ = std::make_unique<Watched>();
  for (const at::Tensor& each : captured)
    if (!each.is_inference())
      watched_->captured.emplace_back(each, static_cast<uint32_t>(each._version()));
  const auto& providers = state_->registered().providers;
  for (const auto& flags : state_->registered().flags) {
    has_failed_ = flags_.emplace_back(*flags).has_failed();
    if (has_failed_) return;
  }
  if (providers.empty()) return;
  try {
    const OutsideOfRegions outside;
    before_.reserve(providers.size());
    for (std::size_t i = 0; i < providers.size(); ++i) {
      const UserState::Captured& captured = state_->captured_[i];
      before_.emplace_back();
      if (!captured.begin.has_value() && !captured.is_touched) continue;
      before_.back() = providers[i]->capture();
      if (captured.begin.has_value() &&
          (!is_planted(Fault::BufferBegin) || is_users(*providers[i])))
        restore(*providers[i], wanted(captured));
    }
  } catch (...) {
    undo(/*may_throw=*/false);
    throw;
  }
}

void UserRestore::restore(StateProvider& provider, const std::any& state) {
  provider.restore(state);
  if (watched_ == nullptr || !is_users(provider)) return;
  for (const auto& [tensor, version] : watched_->captured) {
    if (static_cast<uint32_t>(tensor._version()) == version) continue;
    watched_->written.add(tensor);
    c10::VariableVersion shared = tensor.unsafeGetTensorImpl()->version_counter();
    shared.set_version(version);
  }
}

UserRestore::~UserRestore() {
  undo(/*may_throw=*/false);
  while (!flags_.empty()) flags_.pop_back();
}

void UserRestore::move_to(const std::vector<std::any>& states) {
  const OutsideOfRegions outside;
  for (std::size_t i = 0; i < states.size(); ++i)
    if (state_->captured_[i].begin.has_value())
      restore(*state_->registered().providers[i], states[i]);
}

bool UserRestore::is_as_left(const at::Tensor& in_forward, const at::Tensor& now) const {
  const OutsideOfRegions outside;
  for (std::size_t i = 0; state_ != nullptr && i < state_->captured_.size(); ++i) {
    const auto* const buffer = dynamic_cast<const Buffer*>(state_->registered().providers[i].get());
    if (buffer != nullptr && buffer->tensor().is_same(in_forward) &&
        state_->captured_[i].left.has_value())
      return Buffer::is_as(now, state_->captured_[i].left);
  }
  return Buffer::is_as(now, Buffer::state_of(in_forward));
}

bool UserRestore::has_written_all() {
  if (state_->has_replaced_) return false;
  for (; num_written_ < state_->captured_.size(); ++num_written_) {
    const UserState::Captured& captured = state_->captured_[num_written_];
    if (!captured.left.has_value()) continue;
    const auto& buffer = static_cast<const Buffer&>(*state_->registered().providers[num_written_]);
    if (!buffer.has_writes_of(captured.begin, captured.left, wanted(captured))) return false;
  }
  return true;
}

at::Tensor UserRestore::changed_buffer() const {
  if (is_planted(Fault::BufferCompare)) return {};
  const OutsideOfRegions outside;
  for (std::size_t i = 0; i < state_->captured_.size(); ++i) {
    const std::any& left = state_->captured_[i].left;
    if (!left.has_value()) continue;
    auto& buffer = static_cast<Buffer&>(*state_->registered().providers[i]);
    // If the recompute begins from forward's end, writing the same contents would hide a read of
    // wrong contents.
    const bool may_write = start_ == StartsFrom::Begin || !state_->has_begin();
    if (may_write ? !buffer.is_as(left) : buffer.is_touched_since(left)) return buffer.tensor();
  }
  return {};
}

void UserRestore::put_back() { undo(/*may_throw=*/true); }

void UserRestore::undo(bool may_throw) {
  std::exception_ptr thrown;
  while (!before_.empty()) {
    const std::any state = std::move(before_.back());
    before_.pop_back();
    if (!state.has_value()) continue;
    try {
      const OutsideOfRegions outside;
      StateProvider& provider = *state_->registered().providers[before_.size()];
      if (!is_planted(Fault::BufferEnd) || is_users(provider)) restore(provider, state);
    } catch (...) {
      if (!thrown) thrown = std::current_exception();
    }
  }
  if (!thrown) return;
  if (may_throw) std::rethrow_exception(thrown);
  seam::warn(
      "remat: a StateProvider could not restore its state while another exception was "
      "propagating");
}

}  // namespace remat
