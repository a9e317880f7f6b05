#pragma once
// What a recompute must see as forward saw it, beyond what the library knows: the user's own state,
// generators, and callbacks around every recompute.

#include <ATen/core/Generator.h>

#include <any>
#include <functional>
#include <memory>

#include "remat/export.h"
#include "remat/scope.h"

namespace remat {

/// State of the user's own that a region's function reads, such as a random engine of the standard
/// library. Captured when a region begins; restored before each of its recomputes, and put back to
/// what it was before that recompute when it has ended, stopped or thrown. Both are called under
/// no-grad, and what they compute belongs to no region. Exceptions of both reach the caller.
/// Captured, too, at the end of each `save_region` inside, so that a recompute which does not run
/// its function restores what that left.
/// Threads: recomputes in several threads that use one provider take turns (one that waits longer
/// than ten seconds throws RecomputeFailed); forwards call `capture` on their own threads.
class REMAT_API StateProvider {
 public:
  virtual ~StateProvider();
  virtual std::any capture() = 0;                   ///< the state as it is
  virtual void restore(const std::any& state) = 0;  ///< sets what `capture` returned
};

// Each of these guards applies to the regions that begin while it is alive, on this thread. They
// keep what they were given, for their recomputes, which may come later; so do the regions that
// begin inside such a recompute. A provider or generator that is guarded inside a region is kept by
// that region too, as it is then; it should not have been used in the region before.

/// Regions that begin while it is alive, on this thread, keep what `provider` captured, and restore
/// it around their recomputes.
class REMAT_API StateProviderGuard : detail::ScopeGuard {
 public:
  explicit StateProviderGuard(std::shared_ptr<StateProvider> provider);  ///< until the guard ends
};

/// Preserves a generator of the user's own, or of a device, as `preserve_rng_state` preserves the
/// default ones; no effect in a region with `preserve_rng_state = false`.
class REMAT_API GeneratorGuard : detail::ScopeGuard {
 public:
  explicit GeneratorGuard(at::Generator generator);  ///< until the guard ends
};

/// Called around every recompute, on the thread that runs it, in pairs, also when it stops or
/// throws: to gather and free sharded parameters, for example. `begin` runs before the region's
/// inputs are fetched and its state is restored. A `begin` that throws fails the recompute, and its
/// own `end` is not called; what an `end` throws is a warning.
struct RecomputeObserver {
  std::function<void(const PhaseInfo&)> begin{};  ///< before a recompute; may be empty
  std::function<void(const PhaseInfo&)> end{};    ///< after it; may be empty
};

/// Recomputes of regions that begin while it is alive, on this thread, call the observer.
class REMAT_API RecomputeObserverGuard : detail::ScopeGuard {
 public:
  explicit RecomputeObserverGuard(RecomputeObserver observer);  ///< until the guard ends
};

}  // namespace remat
