#pragma once
// What a region was called with: its function, the options in force, and what only some regions have.

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lib/frame/tensor_check.h"
#include "lib/observe/op_log.h"
#include "lib/scope/region_info.h"
#include "remat/binding.h"

namespace remat {

/// These options are in force for a region, guards applied.
struct RegionOptions {
  bool early_stop = true, debug = false, preserve_rng_state = true, strict_unpack = false;
  bool offload_inputs = false;
  bool ignores_buffers = false;  ///< `BufferPolicy::Ignore`
  bool copies_inputs = false;    ///< InputMode::CopyOnWrite
  bool always_stops = false;     ///< FunctionFacts::always_stops
  DeterminismCheck determinism_check = DeterminismCheck::Metadata;
  CaptureCheck capture_check = CaptureCheck::Raise;
  /// What guards around the region said, for the regions inside its recompute.
  std::optional<bool> early_stop_guard{}, debug_guard{};
};

/// What only some regions have.
struct RegionExtras {
  std::string name;
  TensorChecks checks;
  ContextPair contexts;
  OpLog forward_log;
  /// In debug mode each slot has the number of the operator that saved it.
  std::vector<int64_t> saved_by;
};

struct Region {
  [[no_unique_address]] RegionInfo info;  // the options begin in its last word
  RegionOptions options;
  std::unique_ptr<RegionExtras> extras{};  ///< null if it has none of them
  std::unique_ptr<RegionBody> body{};

  c10::ArrayRef<std::unique_ptr<TensorCheck>> checks() const {
    if (extras == nullptr) return {};
    return extras->checks;
  }
};

}  // namespace remat
