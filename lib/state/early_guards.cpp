#include "lib/state/early_guards.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "lib/seam/warn.h"

namespace remat {

bool EarlyGuards::has(const void* subject) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(undo_.begin(), undo_.end(),
                     [subject](const Undo& each) { return each.subject == subject; });
}

void EarlyGuards::keep(const void* subject, std::function<void()> restore) {
  const std::lock_guard<std::mutex> lock(mutex_);
  undo_.push_back({subject, std::move(restore)});
}

void EarlyGuards::add(const UserRegistrations& opened, const UserState* known, DrawSource& draws,
                      bool preserves_rng, bool puts_back) {
  is_used_.store(true, std::memory_order_release);
  const auto contains = [](const auto& all, const auto& one) {
    return std::find(all.begin(), all.end(), one) != all.end();
  };
  for (const auto& provider : opened.providers) {
    if (known != nullptr && contains(known->registered().providers, provider)) continue;
    if (has(provider.get())) continue;
    const OutsideOfRegions outside;
    keep(provider.get(), [provider, state = provider->capture()] {
      const OutsideOfRegions outside;
      provider->restore(state);
    });
  }
  if (!preserves_rng) return;
  for (const at::Generator& generator : opened.generators) {
    if (at::CPUGeneratorImpl* const impl = as_cpu_generator(generator)) {
      if (!puts_back || draws.draw_replay(*impl) != nullptr) continue;
      const std::lock_guard<std::mutex> lock(mutex_);
      cpu_generators_.emplace_back(generator, *impl);
      continue;
    }
    const void* const subject = generator.unsafeGetGeneratorImpl();
    if (known != nullptr && contains(known->registered().generators, generator)) continue;
    if (!has(subject))
      keep(subject, [state = DeviceRng::present(generator)] { DeviceRng::set({state}); });
  }
}

DrawReplay* EarlyGuards::replay_of(const c10::GeneratorImpl& generator) {
  if (!is_used_.load(std::memory_order_acquire)) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (CpuGenerator& each : cpu_generators_)
    if (&each.replay.original() == &generator) return &each.replay;
  return nullptr;
}

void EarlyGuards::put_back() noexcept {
  if (!is_used_.load(std::memory_order_acquire)) return;
  std::vector<Undo> undo;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    undo.swap(undo_);
  }
  for (; !undo.empty(); undo.pop_back()) {
    try {
      undo.back().restore();
    } catch (const std::exception& e) {
      seam::warn(c10::str("remat: the state of a guard could not be restored after a recompute: ",
                          seam::text_of(e)));
    } catch (...) {
      seam::warn("remat: the state of a guard could not be restored after a recompute");
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto each = cpu_generators_.rbegin(); each != cpu_generators_.rend(); ++each)
    each->swap.reset();
}

}  // namespace remat
