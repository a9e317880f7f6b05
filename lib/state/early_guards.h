#pragma once
// Puts back what guards of state.h guard that a recompute opens where its forward has not come to
// yet.
//
// A recompute that runs while its forward waits for it (a backward inside the region asked) may run
// on past where forward is: user code catches what ends it, or nothing may end it. What the guards
// it opens there guard is put back as it was when they were opened.

#include <any>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "lib/rng/device_rng.h"
#include "lib/rng/draws.h"
#include "lib/state/user_state.h"

namespace remat {

/// The guards of one recompute. Held states need nothing: nobody holds them yet. Threads: any.
class EarlyGuards {
 public:
  ~EarlyGuards() { put_back(); }
  EarlyGuards& operator=(EarlyGuards&&) = delete;

  /// `known`: what forward registered, or null. `draws`: the recompute's own; CPU generators that
  /// it does not draw again are drawn from themselves, since the function may seed them, too.
  /// `puts_back`: on the thread that will call put_back. Throws what a provider throws.
  void add(const UserRegistrations& opened, const UserState* known, DrawSource& draws,
           bool preserves_rng, bool puts_back);
  /// The replay of a CPU generator that was added; null if it was not.
  DrawReplay* replay_of(const c10::GeneratorImpl& generator);
  /// The latest are put back first, before what forward registered. Only warns of what a provider
  /// throws.
  void put_back() noexcept;

 private:
  struct CpuGenerator {
    CpuGenerator(at::Generator kept, at::CPUGeneratorImpl& impl)
        : generator(std::move(kept)), replay(impl), swap(std::in_place, replay) {}
    const at::Generator generator;
    DrawReplay replay;  // as long as threads may have inherited the scope
    std::optional<GeneratorSwap> swap;
  };
  template <class List, class Value, class Member>
  bool lists(const List& list, const Value& value, Member member);

  std::mutex mutex_;  // not held while user code runs
  std::vector<std::pair<std::shared_ptr<StateProvider>, std::any>> providers_;
  std::vector<GeneratorState> generators_;  // that are no CPU generators
  std::list<CpuGenerator> cpu_generators_;
};

}  // namespace remat
