#pragma once
// Guards that steer checkpoints in a scope, and queries about the region that runs now.
//
// All guards: the constructor sets, the destructor restores; innermost wins; they belong to the
// thread that made them and are carried to the threads on which a backward called there runs.
// A guard destroyed out of order, or on another thread, ends its own effect only.

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

/// Turns early stop on or off for the regions run in its scope, over `CheckpointOptions`. Read
/// when a region runs forward (upstream: `set_checkpoint_early_stop`).
class REMAT_API EarlyStopGuard : detail::ScopeGuard {
 public:
  explicit EarlyStopGuard(bool enabled);  ///< until the guard ends
};

/// Turns debug mode on or off over `CheckpointOptions`; `std::nullopt` defers to the option. Read
/// when a region runs forward (upstream: `set_checkpoint_debug_enabled`). With REMAT_DEBUG_STACKS=1
/// in the environment the report also shows the C++ functions that called the first operator that
/// differs, for 10 to 20 us an operator.
class REMAT_API DebugGuard : detail::ScopeGuard {
 public:
  explicit DebugGuard(std::optional<bool> enabled);  ///< until the guard ends
};

/// `checkpoint()` calls in its scope run plainly: no frame, nothing dropped.
class REMAT_API DisableCheckpointGuard : detail::ScopeGuard {
 public:
  DisableCheckpointGuard();
};

/// Decides by level which calls of `checkpoint()` in its scope are regions: of those whose options
/// have a level (`CheckpointOptions::level`) the ones with `training_level >= level` and
/// `level > 0`; the others run plainly. Calls without a level are regions as ever. Recomputes see
/// the level that forward saw. The levels of modules (`set_checkpoint_level`) are their own.
class REMAT_API CheckpointLevelGuard : detail::ScopeGuard {
 public:
  explicit CheckpointLevelGuard(int64_t training_level);  ///< until the guard ends
};

/// While alive, several backward calls on this thread share one recompute of each region, as those
/// of a split backward do (first the gradients of the inputs, later those of the weights). Each
/// saved tensor is released when a backward has read it; a second backward call that reads the same
/// one throws CheckpointError (GroupOverlap). At its end what is still held is freed. Throws:
/// c10::Error where a group is alive already.
class REMAT_API GraphExecGroup : detail::ScopeGuard {
 public:
  GraphExecGroup();
};

/// How much a `RecomputeCacheGuard` may keep.
struct RecomputeCacheOptions {
  /// [bytes] Limit of all recomputed tensors that are kept, over all regions.
  int64_t max_bytes = std::numeric_limits<int64_t>::max();
};

/// While alive, backward calls on this thread keep what a region recomputed for the next ones, so
/// that any number of overlapping `torch::autograd::grad` calls on a retained graph cost one
/// recompute per region. Beyond `max_bytes` the regions used least recently are dropped; a region
/// that is larger than that by itself is recomputed for each call. If a parameter, buffer or
/// captured tensor of a region changed meanwhile, its tensors are dropped too, and the recompute
/// says so. At its end everything it holds is freed. Within a GraphExecGroup the group decides.
class REMAT_API RecomputeCacheGuard : detail::ScopeGuard {
 public:
  explicit RecomputeCacheGuard(RecomputeCacheOptions options = {});  ///< until the guard ends
};

/// True inside a region's first run that no recompute encloses.
REMAT_API bool is_checkpointing();
/// True inside a recompute of any enclosing frame, also in the first run of a frame nested in it.
REMAT_API bool is_recomputing();

/// The run of a region's function.
enum class Phase { None, Forward, Recompute };

/// The region whose function runs, and which of its runs it is.
struct PhaseInfo {
  Phase phase = Phase::None;  ///< None outside of regions
  int64_t frame_id = -1;      ///< the same in forward and recompute: a key for per-region state
  int64_t depth = 0;          ///< enclosing frames, this one included
  std::string name{};         ///< `CheckpointOptions::name`, or its default
};

/// The phase of the innermost frame on this thread, also on the threads of a backward.
REMAT_API PhaseInfo current_phase();

}  // namespace remat
