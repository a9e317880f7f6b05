#pragma once
// A region's function, the options in force, and data that only some regions have.

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lib/base/spin_lock.h"
#include "lib/frame/tensor_check.h"
#include "lib/scope/op_log.h"
#include "lib/scope/region_info.h"
#include "remat/binding.h"

namespace remat {

class Surroundings;

/// The options in force for a region, guards applied.
struct RegionOptions {
  static constexpr uint16_t max_line = 0x7fff;
  enum class Guarded : uint8_t { No, Off, On };

  // In this order no field crosses the boundary of its storage unit.
  uint16_t line : 15 = 0;  ///< of `CheckpointOptions::location`; `max_line` if that or larger
  bool early_stop : 1 = true;
  /// Settings of the guards around the region, for the regions inside its recompute.
  Guarded early_stop_guard : 2 = Guarded::No;
  Guarded debug_guard : 2 = Guarded::No;
  bool debug : 1 = false;
  bool preserve_rng_state : 1 = true;
  bool strict_unpack : 1 = false;
  bool offload_inputs : 1 = false;
  bool ignores_buffers : 1 = false;  ///< `BufferPolicy::Ignore`
  bool copies_inputs : 1 = false;    ///< InputMode::CopyOnWrite
  bool always_stops : 1 = false;     ///< FunctionFacts::always_stops
  DeterminismCheck determinism_check : 3 = DeterminismCheck::Metadata;
  CaptureCheck capture_check : 2 = CaptureCheck::Raise;

  static Guarded guarded(std::optional<bool> said) {
    return !said ? Guarded::No : *said ? Guarded::On : Guarded::Off;
  }
  static std::optional<bool> said(Guarded guarded) {
    if (guarded == Guarded::No) return std::nullopt;
    return guarded == Guarded::On;
  }
};
static_assert(sizeof(RegionOptions) == 4, "they fill the last word of the info");

/// Data that only some regions have.
struct RegionExtras {
  std::string name;
  TensorChecks checks;
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
};

struct Region {
  [[no_unique_address]] RegionInfo info;  // the options begin in its last word
  RegionOptions options;
  std::unique_ptr<RegionExtras> extras{};  ///< null if the region has none
  std::unique_ptr<RegionBody> body{};
  const char* file = nullptr;  ///< of `CheckpointOptions::location`
  /// Registrations of the enclosing scopes, which resolve tensor names; null for a region reported
  /// without its frame.
  const Surroundings* surroundings = nullptr;

  c10::ArrayRef<std::unique_ptr<TensorCheck>> checks() const {
    if (extras == nullptr) return {};
    return extras->checks;
  }
};

}  // namespace remat
