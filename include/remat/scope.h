#pragma once
// Guards that control checkpoints in a scope, and queries about the region that runs now.
//
// For all guards, the constructor sets and the destructor restores, and the innermost guard wins. A
// guard belongs to the thread that made it, and also applies on the threads on which a backward
// called there runs. A guard that is destroyed out of order, or on another thread, ends only its
// own effect.

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "remat/export.h"

namespace remat {

namespace detail {

class Scope;  // lib/scope/hook_stack.h

/// Owns one entry of the calling thread's scope stack.
class REMAT_API ScopeGuard {
 public:
  ScopeGuard(const ScopeGuard&) = delete;
  ScopeGuard(ScopeGuard&&) = delete;
  ScopeGuard& operator=(const ScopeGuard&) = delete;
  ScopeGuard& operator=(ScopeGuard&&) = delete;

 protected:
  explicit ScopeGuard(std::shared_ptr<Scope> scope);
  ~ScopeGuard();

 private:
  std::shared_ptr<Scope> scope_;
};

}  // namespace detail

/// Hides the operators in its scope from the regions around it, in forward and in recomputes. No
/// policy is asked about them, no debug report lists them, and nothing counts, compares or drops
/// their saved tensors: those stay until backward, as outside of regions. Use it for code that only
/// one of the passes runs, such as logging under `!is_recomputing()`. Random numbers are drawn
/// from the generators themselves, anew in each recompute. Guards around the regions apply.
class REMAT_API UnseenGuard {
 public:
  UnseenGuard();
  ~UnseenGuard();
  UnseenGuard(const UnseenGuard&) = delete;
  UnseenGuard& operator=(const UnseenGuard&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;  // null outside of regions
};

/// Turns early stop on or off for the regions in its scope, overriding `CheckpointOptions`. Takes
/// effect when a region runs forward (upstream: `set_checkpoint_early_stop`).
class REMAT_API EarlyStopGuard : detail::ScopeGuard {
 public:
  explicit EarlyStopGuard(bool enabled);  ///< until the guard ends
};

/// Turns debug mode on or off, overriding `CheckpointOptions`; `std::nullopt` defers to the option.
/// Takes effect when a region runs forward (upstream: `set_checkpoint_debug_enabled`). With
/// REMAT_DEBUG_STACKS=1 in the environment the report also shows the C++ functions that called the
/// first operator that differs. This costs 10 to 20 us per operator.
class REMAT_API DebugGuard : detail::ScopeGuard {
 public:
  explicit DebugGuard(std::optional<bool> enabled);  ///< until the guard ends
};

/// Makes `checkpoint()` calls in its scope run plainly: without a frame, and with all saved tensors
/// kept.
class REMAT_API DisableCheckpointGuard : detail::ScopeGuard {
 public:
  DisableCheckpointGuard();
};

/// Decides by level which calls of `checkpoint()` in its scope are regions. A call whose options
/// have a level (`CheckpointOptions::level`) is a region if `training_level >= level` and
/// `level > 0`; otherwise it runs plainly. Calls without a level are not affected. Recomputes see
/// the level that forward saw. The levels of modules (`set_checkpoint_level`) are independent.
class REMAT_API CheckpointLevelGuard : detail::ScopeGuard {
 public:
  explicit CheckpointLevelGuard(int64_t training_level);  ///< until the guard ends
};

/// While alive, several backward calls on this thread share one recompute of each region. Use it
/// for a split backward (first the gradients of the inputs, later those of the weights). Each saved
/// tensor is released when a backward has read it; a second backward call that reads the same
/// tensor throws CheckpointError (GroupOverlap). The end of the group frees the remaining tensors.
/// Throws: c10::Error if a group is alive already.
class REMAT_API GraphExecGroup : detail::ScopeGuard {
 public:
  GraphExecGroup();
};

/// Limits of a `RecomputeCacheGuard`.
struct RecomputeCacheOptions {
  /// [bytes] Limit of the recomputed tensors in the cache, over all regions.
  int64_t max_bytes = std::numeric_limits<int64_t>::max();
};

/// While alive, backward calls on this thread keep recomputed tensors for later calls. Any number
/// of overlapping `torch::autograd::grad` calls on a retained graph then cost one recompute per
/// region. Beyond `max_bytes` the least recently used regions are dropped; a region that alone
/// exceeds the limit is recomputed for each call. If a parameter, buffer or captured tensor of a
/// region changed meanwhile, its tensors are dropped too, and the recompute reports the change. The
/// end of the guard frees all tensors that it holds. Within a GraphExecGroup the group's rules
/// apply.
class REMAT_API RecomputeCacheGuard : detail::ScopeGuard {
 public:
  explicit RecomputeCacheGuard(RecomputeCacheOptions options = {});  ///< until the guard ends
};

/// Returns true under a DisableCheckpointGuard: calls of `checkpoint()` run plainly.
REMAT_API bool is_checkpointing_disabled();
/// Returns true inside a region's first run that no recompute encloses.
REMAT_API bool is_checkpointing();
/// Returns true inside a recompute of any enclosing frame, also in the first run of a frame nested
/// in it.
REMAT_API bool is_recomputing();

/// The kind of run of a region's function.
enum class Phase { None, Forward, Recompute };

/// The region whose function runs, and the kind of the run.
struct PhaseInfo {
  Phase phase = Phase::None;  ///< None outside of regions
  int64_t frame_id = -1;      ///< equal in forward and recompute: a key for per-region state
  int64_t depth = 0;          ///< number of enclosing frames, this one included
  std::string name{};         ///< `CheckpointOptions::name`, or its default
};

/// Returns the phase of the innermost frame on this thread, also on the threads of a backward.
REMAT_API PhaseInfo current_phase();

}  // namespace remat
