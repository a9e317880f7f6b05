#pragma once
// Restores state guarded by guards of state.h that a recompute opens ahead of its waiting forward.
//
// A recompute that runs while its forward waits for it (a backward inside the region asked) may run
// ahead of forward: user code catches its stop, or no stop is possible. State guarded by guards
// that it opens there is restored as it was when they were opened.

#include <atomic>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "lib/rng/device_rng.h"
#include "lib/rng/draws.h"
#include "lib/state/user_state.h"

namespace remat {

/// The guards of one recompute. Held states are not restored here: no recompute holds them yet.
/// Threads: any.
class EarlyGuards {
 public:
  ~EarlyGuards() { put_back(); }
  EarlyGuards& operator=(EarlyGuards&&) = delete;

  /// Adds an opened guard's state. `known`: forward's registrations, or null. `draws`: the
  /// recompute's own; CPU generators that it does not replay are drawn from directly, since the
  /// function may seed them, too. `puts_back`: whether this is the thread that will call put_back.
  /// Throws exceptions of a provider.
  void add(const UserRegistrations& opened, const UserState* known, DrawSource& draws,
           bool preserves_rng, bool puts_back);
  /// Returns the replay of a CPU generator that was added, or null.
  DrawReplay* replay_of(const c10::GeneratorImpl& generator);
  /// Restores the latest first, before the state that forward registered. Only warns of exceptions
  /// of a provider.
  void put_back() noexcept;

 private:
  struct CpuGenerator {
    CpuGenerator(at::Generator kept, at::CPUGeneratorImpl& impl)
        : generator(std::move(kept)), replay(impl), swap(std::in_place, replay) {}
    const at::Generator generator;
    DrawReplay replay;  // lives as long as threads may have inherited the scope
    std::optional<GeneratorSwap> swap;
  };
  /// Restores a provider, or a generator other than a CPU generator.
  struct Undo {
    const void* subject;
    std::function<void()> restore;
  };
  bool has(const void* subject);
  void keep(const void* subject, std::function<void()> restore);

  std::atomic<bool> is_used_{false};  // false in most recomputes, which then take no lock
  std::mutex mutex_;                  // not held while user code runs
  std::vector<Undo> undo_;
  std::list<CpuGenerator> cpu_generators_;
};

}  // namespace remat
