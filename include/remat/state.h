#pragma once
// State that a recompute must see as forward did and that the library does not know: the user's own
// state, generators, and callbacks around every recompute.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <any>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "remat/export.h"
#include "remat/scope.h"

namespace remat {

/// The user's own state that a region's function reads, such as a random engine of the standard
/// library. It is captured when a region begins, and restored before each of its recomputes. When a
/// recompute has ended, stopped or thrown, the state from before it is restored. Both functions are
/// called under no-grad, and their computations belong to no region. Their exceptions reach the
/// caller. The state is also captured at the end of each `save_region` inside: a recompute that
/// skips its function restores that state.
/// Threads: recomputes in several threads that use one provider take turns; a recompute that waits
/// longer than ten seconds throws RecomputeFailed. Forwards call `capture` on their own threads.
class REMAT_API StateProvider {
 public:
  virtual ~StateProvider();
  virtual std::any capture() = 0;                   ///< returns the present state
  virtual void restore(const std::any& state) = 0;  ///< sets a state that `capture` returned
};

// Each of these guards applies to the regions that begin on this thread while it is alive. Such a
// region keeps the guard's object for its later recomputes; so do the regions that begin inside
// such a recompute. If a provider or generator is guarded inside a region, that region also keeps
// it, with its state at that moment. The region should not have used it before.

/// While alive, regions that begin on this thread keep the state that `provider` captures, and
/// restore it around their recomputes.
class REMAT_API StateProviderGuard : detail::ScopeGuard {
 public:
  explicit StateProviderGuard(std::shared_ptr<StateProvider> provider);  ///< until the guard ends
};

/// Preserves a generator of the user or of a device, as `preserve_rng_state` preserves the default
/// generators. Has no effect in a region with `preserve_rng_state = false`.
class REMAT_API GeneratorGuard : detail::ScopeGuard {
 public:
  explicit GeneratorGuard(at::Generator generator);  ///< until the guard ends
};

/// Random generators with names, such as one for each form of parallelism (Megatron-LM's tracker).
/// Within a `GeneratorForkGuard` the default generator of the device continues the sequence of one
/// of them. Recomputes of a region that forks see the states from the region's first fork, and
/// restore the present ones afterwards, with `preserve_rng_state = false` as well.
/// Memory: one copy of all states for each region that forks (5 KB per generator of the CPU). Such
/// a region on the CPU is not stopped early.
/// Threads: any; those that draw from one default generator at once disturb each other.
class REMAT_API GeneratorTracker final : public StateProvider {
 public:
  /// Makes a tracker without generators. `device`: the device whose default generator forks
  /// replace; without an index, the current device of its type.
  explicit GeneratorTracker(c10::Device device = c10::kCPU);
  ~GeneratorTracker() override;
  /// Adds a generator. Throws `c10::ValueError` if there is one with that name.
  void add(const std::string& name, uint64_t seed);
  /// Returns copies of all states, by name: for a checkpoint file of the program.
  std::map<std::string, at::Tensor> states() const;
  /// Sets the states, and with them the names, to those that `states` returned. Throws c10::Error
  /// within a fork.
  void set_states(const std::map<std::string, at::Tensor>& states);
  std::any capture() override;                      ///< returns all states
  void restore(const std::any& captured) override;  ///< sets states that `capture` returned

 private:
  friend class GeneratorForkGuard;
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

/// While alive, the default generator of a tracker's device continues the named generator; then it
/// continues its own sequence. Forks of different names nest.
/// Throws: `c10::ValueError` for an unknown name, or one that is forked already.
class REMAT_API GeneratorForkGuard {
 public:
  /// Begins the fork of the tracker's generator of that name, on this thread.
  GeneratorForkGuard(std::shared_ptr<GeneratorTracker> tracker, std::string name);
  ~GeneratorForkGuard();
  GeneratorForkGuard(const GeneratorForkGuard&) = delete;
  GeneratorForkGuard& operator=(const GeneratorForkGuard&) = delete;

 private:
  const std::shared_ptr<GeneratorTracker> tracker_;
  const std::string name_;
  const StateProviderGuard registered_;  // first: regions around note the states before the fork
  at::Tensor own_state_;                 // of the default generator, before the fork
};

/// Callbacks around every recompute, on its thread, in pairs, also if it stops or throws. An
/// example is to gather and free sharded parameters. `begin` runs before the region's inputs are
/// fetched and its state is restored. If `begin` throws, the recompute fails and its `end` is not
/// called. An exception of `end` becomes a warning.
struct RecomputeObserver {
  std::function<void(const PhaseInfo&)> begin{};  ///< before a recompute; may be empty
  std::function<void(const PhaseInfo&)> end{};    ///< after it; may be empty
};

/// While alive, regions that begin on this thread get the observer, which their recomputes call.
class REMAT_API RecomputeObserverGuard : detail::ScopeGuard {
 public:
  explicit RecomputeObserverGuard(RecomputeObserver observer);  ///< until the guard ends
};

}  // namespace remat
