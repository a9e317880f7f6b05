#include "lib/state/user_state.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "lib/frame/frame.h"
#include "lib/rng/draws.h"
#include "lib/scope/hook_stack.h"

namespace remat {

namespace {

using detail::Ability;

class ProviderScope final : public detail::Scope {
 public:
  explicit ProviderScope(std::shared_ptr<StateProvider> provider) : provider_(std::move(provider)) {
    answers(Ability::State);
  }
  void add_to(UserRegistrations& all) const override { all.add(provider_); }

 private:
  const std::shared_ptr<StateProvider> provider_;
};

class GeneratorScope final : public detail::Scope {
 public:
  explicit GeneratorScope(at::Generator generator) : generator_(std::move(generator)) {
    answers(Ability::State);
  }
  void add_to(UserRegistrations& all) const override { all.add(generator_); }

 private:
  const at::Generator generator_;
};

class RegistrationsScope final : public detail::Scope {
 public:
  explicit RegistrationsScope(UserRegistrations registrations)
      : registrations_(std::move(registrations)) {
    answers(Ability::State);
  }
  void add_to(UserRegistrations& all) const override {
    for (const auto& provider : registrations_.providers) all.add(provider);
    for (const auto& held : registrations_.held) all.add(held);
  }

 private:
  const UserRegistrations registrations_;
};

class ObserverScope final : public detail::Scope {
 public:
  explicit ObserverScope(RecomputeObserver observer)
      : observer_(std::make_shared<const RecomputeObserver>(std::move(observer))) {
    answers(Ability::State);
  }
  void add_to(UserRegistrations& all) const override { all.observers.push_back(observer_); }

 private:
  const std::shared_ptr<const RecomputeObserver> observer_;
};

std::shared_ptr<detail::Scope> provider_scope(std::shared_ptr<StateProvider> provider) {
  TORCH_CHECK_VALUE(provider != nullptr,
                    "remat::StateProviderGuard: the provider is null. Do: pass an object.");
  return std::make_shared<ProviderScope>(std::move(provider));
}

std::shared_ptr<detail::Scope> generator_scope(at::Generator generator) {
  TORCH_CHECK_VALUE(generator.defined(),
                    "remat::GeneratorGuard: the generator is not defined. Do: pass one that "
                    "at::make_generator or the like has made.");
  return std::make_shared<GeneratorScope>(std::move(generator));
}

/// User code runs as part of no region.
struct OutsideOfRegions {
  const detail::NoScopes no_scopes;
  const at::NoGradGuard no_grad;
};

}  // namespace

StateProvider::~StateProvider() = default;

namespace {

/// A guard that is opened inside regions, as a module does that guards its own state: their
/// recomputes need it too.
template <class Keep>
void tell_regions_around(const UserRegistrations& opened, const Keep& keep) {
  std::vector<Frame*> frames;
  detail::Scope* recompute = nullptr;  // one at most on a thread's stack, and its pins
  detail::visit(Ability::Region, [&](detail::Scope& scope) {
    if (!scope.is_recompute)
      frames.push_back(scope.frame());
    else if (!scope.is_save_region)
      recompute = &scope;
  });
  if (!frames.empty()) keep(frames);
  if (recompute != nullptr && recompute->is_own_thread()) recompute->guard_opened(opened);
}

template <class T>
bool contains(const std::vector<T>& all, const T& one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

}  // namespace

std::shared_ptr<detail::Scope> scope_that_registers(UserRegistrations registrations) {
  return std::make_shared<RegistrationsScope>(std::move(registrations));
}

void tell_regions_around(const UserRegistrations& registrations) {
  tell_regions_around(registrations, [&](const std::vector<Frame*>& frames) {
    for (const auto& provider : registrations.providers) {
      std::any state;
      {
        const OutsideOfRegions outside;
        state = provider->capture();
      }
      for (Frame* frame : frames) frame->keep(provider, state);
    }
    for (const auto& held : registrations.held)
      for (Frame* frame : frames) frame->keep(held);
  });
}

StateProviderGuard::StateProviderGuard(std::shared_ptr<StateProvider> provider)
    : ScopeGuard(provider_scope(provider)) {
  UserRegistrations registrations;
  registrations.add(provider);
  tell_regions_around(registrations);
}

GeneratorGuard::GeneratorGuard(at::Generator generator) : ScopeGuard(generator_scope(generator)) {
  UserRegistrations registrations;
  registrations.add(generator);
  tell_regions_around(registrations, [&](const std::vector<Frame*>& frames) {
    for (Frame* frame : frames) frame->keep(generator);
  });
}

RecomputeObserverGuard::RecomputeObserverGuard(RecomputeObserver observer)
    : ScopeGuard(std::make_shared<ObserverScope>(std::move(observer))) {}

void UserRegistrations::add(const std::shared_ptr<StateProvider>& provider) {
  if (!contains(providers, provider)) providers.push_back(provider);
}

void UserRegistrations::add(const std::shared_ptr<HeldState>& held_state) {
  for (const auto& known : held)
    if (known->subject() == held_state->subject()) return;
  held.push_back(held_state);
}

void UserRegistrations::add(const at::Generator& generator) {
  if (!contains(generators, generator)) generators.push_back(generator);
}

std::shared_ptr<const UserRegistrations> UserRegistrations::around() {
  if (detail::innermost(Ability::State) == nullptr) return nullptr;
  std::vector<const detail::Scope*> scopes;
  detail::visit(Ability::State, [&](detail::Scope& scope) { scopes.push_back(&scope); });
  auto all = std::make_shared<UserRegistrations>();
  for (auto scope = scopes.rbegin(); scope != scopes.rend(); ++scope) (*scope)->add_to(*all);
  return all;
}

UserState::UserState(const UserRegistrations& registered, bool preserves_rng) {
  registered_.observers = registered.observers;
  registered_.held = registered.held;
  for (const auto& provider : registered.providers) {
    const OutsideOfRegions outside;
    keep(provider, provider->capture());
  }
  if (!preserves_rng) return;
  for (const at::Generator& generator : registered.generators) keep(generator);
}

void UserState::keep(const std::shared_ptr<StateProvider>& provider, const std::any& state) {
  const std::size_t known = registered_.providers.size();
  registered_.add(provider);
  if (registered_.providers.size() > known) captured_.push_back(state);
}

void UserState::keep(const at::Generator& generator) {
  const std::size_t known = registered_.generators.size();
  registered_.add(generator);
  at::CPUGeneratorImpl* const impl = as_cpu_generator(generator);
  if (registered_.generators.size() == known || impl == nullptr || impl == &default_cpu_generator())
    return;
  draw_logs_.push_back(std::make_unique<DrawLog>(*impl));
  draw_logs_.back()->begin();
}

UserState::~UserState() = default;

void EarlyGuards::add(const UserRegistrations& opened, const UserState* known, bool preserves_rng) {
  const auto lists = [&](const auto& list, const auto& one, const auto& member) {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::any_of(list.begin(), list.end(),
                       [&](const auto& each) { return std::invoke(member, each) == one; });
  };
  using KeptProvider = decltype(providers_)::value_type;
  for (const auto& provider : opened.providers) {
    if (known != nullptr && contains(known->registered().providers, provider)) continue;
    if (lists(providers_, provider, &KeptProvider::first)) continue;
    const OutsideOfRegions outside;
    KeptProvider kept(provider, provider->capture());
    std::lock_guard<std::mutex> lock(mutex_);
    providers_.push_back(std::move(kept));
  }
  if (!preserves_rng) return;
  for (const at::Generator& generator : opened.generators) {
    if (known != nullptr && contains(known->registered().generators, generator)) continue;
    if (as_cpu_generator(generator) != nullptr ||
        lists(generators_, generator, &GeneratorState::generator))
      continue;
    GeneratorState kept = DeviceRng::present(generator);
    std::lock_guard<std::mutex> lock(mutex_);
    generators_.push_back(std::move(kept));
  }
}

void EarlyGuards::put_back() noexcept {
  decltype(providers_) providers;
  decltype(generators_) generators;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    providers.swap(providers_);
    generators.swap(generators_);
  }
  const auto attempt = [](const auto& restore) {
    try {
      restore();
    } catch (const std::exception& e) {
      TORCH_WARN("remat: what a guard guards could not be put back after a recompute: ", e.what());
    } catch (...) {
      TORCH_WARN("remat: what a guard guards could not be put back after a recompute");
    }
  };
  for (; !providers.empty(); providers.pop_back())
    attempt([&] {
      const OutsideOfRegions outside;
      providers.back().first->restore(providers.back().second);
    });
  for (; !generators.empty(); generators.pop_back())
    attempt([&] { DeviceRng::set({generators.back()}); });
}

ObservedRecompute::ObservedRecompute(const UserState* state, int64_t frame_id, int64_t depth,
                                     const std::string& name)
    : state_(state) {
  if (state_ == nullptr) return;
  phase_ = {Phase::Recompute, frame_id, depth, name};
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
      TORCH_WARN("remat: a RecomputeObserver's end threw, which is ignored: ", e.what());
    } catch (...) {
      TORCH_WARN("remat: a RecomputeObserver's end threw, which is ignored");
    }
  }
}

UserRestore::UserRestore(const UserState* state, const LockOwner& owner) : state_(state) {
  if (state_ == nullptr) return;
  const auto& providers = state_->registered().providers;
  // In one order for all, so that two recomputes never wait for each other.
  constexpr std::chrono::seconds longest_wait(10);
  std::vector<const StateProvider*> wanted;
  for (const auto& provider : providers) wanted.push_back(provider.get());
  std::sort(wanted.begin(), wanted.end(), std::less<>());
  for (const StateProvider* provider : wanted) {
    has_failed_ = !recompute_lock().acquire(provider, owner, longest_wait);
    if (has_failed_) return;
    acquired_.push_back(provider);
  }
  for (const auto& held : state_->registered().held) {
    held_.push_back(held->hold());
    has_failed_ = held_.back() == nullptr;
    if (has_failed_) return;
  }
  try {
    const OutsideOfRegions outside;
    for (std::size_t i = 0; i < providers.size(); ++i) {
      before_.push_back(providers[i]->capture());
      providers[i]->restore(state_->captured_[i]);
    }
  } catch (...) {
    undo(/*may_throw=*/false);
    release_all();
    throw;
  }
}

UserRestore::~UserRestore() {
  undo(/*may_throw=*/false);
  release_all();
}

void UserRestore::put_back() { undo(/*may_throw=*/true); }

void UserRestore::undo(bool may_throw) {
  std::exception_ptr thrown;
  while (!before_.empty()) {
    const std::any state = std::move(before_.back());
    before_.pop_back();
    try {
      const OutsideOfRegions outside;
      state_->registered().providers[before_.size()]->restore(state);
    } catch (...) {
      if (!thrown) thrown = std::current_exception();
    }
  }
  if (!thrown) return;
  if (may_throw) std::rethrow_exception(thrown);
  TORCH_WARN("remat: a StateProvider could not put back its state while an error was on its way");
}

void UserRestore::release_all() noexcept {
  while (!held_.empty()) held_.pop_back();
  for (const StateProvider* provider : acquired_) recompute_lock().release(provider);
  acquired_.clear();
}

}  // namespace remat
