#include "lib/state/early_guards.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <functional>

#include "lib/seam/warn.h"

namespace remat {

template <class List, class Value, class Member>
bool EarlyGuards::lists(const List& list, const Value& value, Member member) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(list.begin(), list.end(),
                     [&](const auto& each) { return std::invoke(member, each) == value; });
}

void EarlyGuards::add(const UserRegistrations& opened, const UserState* known, DrawSource& draws,
                      bool preserves_rng, bool puts_back) {
  const auto contains = [](const auto& all, const auto& one) {
    return std::find(all.begin(), all.end(), one) != all.end();
  };
  using KeptProvider = decltype(providers_)::value_type;
  for (const auto& provider : opened.providers) {
    if (known != nullptr && contains(known->registered().providers, provider)) continue;
    if (lists(providers_, provider, &KeptProvider::first)) continue;
    const OutsideOfRegions outside;
    KeptProvider kept(provider, provider->capture());
    const std::lock_guard<std::mutex> lock(mutex_);
    providers_.push_back(std::move(kept));
  }
  if (!preserves_rng) return;
  for (const at::Generator& generator : opened.generators) {
    at::CPUGeneratorImpl* const impl = as_cpu_generator(generator);
    if (impl != nullptr) {
      if (!puts_back || draws.draw_replay(*impl) != nullptr) continue;
      const std::lock_guard<std::mutex> lock(mutex_);
      cpu_generators_.emplace_back(generator, *impl);
      continue;
    }
    if (known != nullptr && contains(known->registered().generators, generator)) continue;
    if (lists(generators_, generator, &GeneratorState::generator)) continue;
    GeneratorState kept = DeviceRng::present(generator);
    const std::lock_guard<std::mutex> lock(mutex_);
    generators_.push_back(std::move(kept));
  }
}

DrawReplay* EarlyGuards::replay_of(const c10::GeneratorImpl& generator) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (CpuGenerator& each : cpu_generators_)
    if (&each.replay.original() == &generator) return &each.replay;
  return nullptr;
}

void EarlyGuards::put_back() noexcept {
  decltype(providers_) providers;
  decltype(generators_) generators;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    providers.swap(providers_);
    generators.swap(generators_);
  }
  const auto attempt = [](const auto& restore) {
    try {
      restore();
    } catch (const std::exception& e) {
      seam::warn(c10::str("remat: what a guard guards could not be put back after a recompute: ",
                          seam::text_of(e)));
    } catch (...) {
      seam::warn("remat: what a guard guards could not be put back after a recompute");
    }
  };
  for (; !providers.empty(); providers.pop_back())
    attempt([&] {
      const OutsideOfRegions outside;
      providers.back().first->restore(providers.back().second);
    });
  for (; !generators.empty(); generators.pop_back())
    attempt([&] { DeviceRng::set({generators.back()}); });
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto each = cpu_generators_.rbegin(); each != cpu_generators_.rend(); ++each)
    each->swap.reset();
}

}  // namespace remat
