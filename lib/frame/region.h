#pragma once
// A region's function, the options in force, and data that only some regions have.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lib/base/spin_lock.h"
#include "lib/frame/ahead_link.h"
#include "lib/frame/tensor_check.h"
#include "lib/scope/op_log.h"
#include "lib/scope/region_info.h"
#include "remat/binding.h"

namespace remat {

class Surroundings;

/// The options in force for a region, guards applied.
struct RegionOptions {
  uint32_t line = 0;  ///< of `CheckpointOptions::location`
  bool early_stop = true;
  bool debug = false;
  /// Settings of the guards around the region, for the regions inside its recompute.
  std::optional<bool> early_stop_guard{}, debug_guard{};
  bool preserve_rng_state = true;
  bool strict_unpack = false;
  bool offload_inputs = false;
  bool ignores_buffers = false;  ///< `BufferPolicy::Ignore`
  bool copies_inputs = false;    ///< InputMode::CopyOnWrite
  bool always_stops = false;     ///< FunctionFacts::always_stops
  DeterminismCheck determinism_check = DeterminismCheck::Metadata;
  CaptureCheck capture_check = CaptureCheck::Raise;
};

/// Data that only some regions have.
struct RegionExtras {
  std::string name;
  std::unique_ptr<TensorCheck> check;  ///< null for none
  ContextPair contexts;
  OpLog forward_log;
  /// In debug mode each slot has the number of the operator that saved it.
  std::vector<int64_t> saved_by;
  SpinLock saved_by_mutex;  ///< for threads that add to `saved_by`
  void note_saver(int64_t position) {
    const auto index = static_cast<std::size_t>(position);
    const std::lock_guard<SpinLock> lock(saved_by_mutex);
    if (saved_by.size() <= index) saved_by.resize(index + 1, -1);
    saved_by[index] = forward_log.size() - 1;
  }
  /// The level of the `CheckpointLevelGuard` around the region, for the calls inside its recompute.
  std::optional<int64_t> training_level;
  /// Set if it is not the default.
  std::optional<int64_t> offload_prefetch_depth;
  /// Set with `prepare_ahead` or `handle`; otherwise null.
  std::unique_ptr<AheadLink> ahead;
};

struct Region {
  RegionInfo info;
  RegionOptions options;
  std::unique_ptr<RegionExtras> extras{};  ///< null if the region has none
  std::unique_ptr<RegionBody> body{};
  const char* file = nullptr;  ///< of `CheckpointOptions::location`
  /// Registrations of the enclosing scopes, which resolve tensor names; null for a region reported
  /// without its frame.
  const Surroundings* surroundings = nullptr;

  /// Returns the check beyond metadata, or null.
  const TensorCheck* check() const { return extras == nullptr ? nullptr : extras->check.get(); }
};

}  // namespace remat
