#pragma once
// The interface through which a region reports its runs to recorders (lib/observe implements it).
//
// A frame asks `is_recording()` at its begin, which reads one flag. A frame that began before any
// recorder stays unrecorded, so that sums hold whole regions only.

#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lib/rng/device_rng.h"
#include "lib/scope/region_info.h"

namespace remat {

struct KeptStorage {
  const c10::StorageImpl* identity;
  c10::Device device;
  int64_t bytes;
};
struct DeviceBytes {
  c10::Device device;
  int64_t bytes;
};

/// Adds bytes to the sum of the device, which begins at 0.
inline void add_to(std::vector<DeviceBytes>& sums, c10::Device device, int64_t bytes) {
  const auto known = std::find_if(sums.begin(), sums.end(),
                                  [&](const DeviceBytes& each) { return each.device == device; });
  if (known != sums.end())
    known->bytes += bytes;
  else
    sums.push_back({device, bytes});
}

/// Counts the bytes that were recomputed for one region and that backward has not read yet. Any
/// thread.
class RecomputedBytes {
 public:
  virtual ~RecomputedBytes() = default;
  virtual void add(c10::Device device, int64_t bytes) = 0;
};

namespace recording {

inline constinit std::atomic<int> num_alive{0};

/// The outcome of one call under a policy, as in DecisionReport.
struct DecidedCall {
  std::string_view op, outcome;  ///< live for good
  std::string reason;
  int64_t bytes = 0;
};
/// Sums of a region at the end of its forward. `dropped_bytes`: of the slots.
struct RegionSums {
  int64_t dropped_bytes = 0, num_slots = 0, offloaded = 0, offload_fallbacks = 0,
          bytes_offloaded = 0;
  double offload_wait_s = 0;
  std::vector<DeviceBytes> saved{};
  std::vector<KeptStorage> parameters{};
  std::vector<DecidedCall> decisions{};  ///< in the order of the calls
};

enum class SlotEvent : uint8_t { Packed, Filled, Read };

}  // namespace recording

inline bool is_recording() { return recording::num_alive.load(std::memory_order_relaxed) != 0; }

/// The record of one recompute, from its begin to its end. Destroyed without `ends`, it records
/// that the recompute threw.
class RecordedRecompute {
 public:
  virtual ~RecordedRecompute() = default;
  /// The function begins to run, on the streams of forward.
  virtual void function_begins() = 0;
  virtual void function_ends() = 0;
  virtual void ends(bool was_stopped, int64_t recomputed_bytes) = 0;
};

/// The record of one region. The frame owns it and outlives every recompute.
class RecordedFrame {
 public:
  virtual ~RecordedFrame() = default;
  virtual void slot_event(recording::SlotEvent event, int64_t position,
                          const std::string& text) = 0;
  /// The function has returned. `met`: the devices of its tensors.
  virtual void ends(const DevicesMet& met, recording::RegionSums sums) = 0;
  virtual void throws() = 0;
  virtual std::unique_ptr<RecordedRecompute> recompute_begins() = 0;
  virtual std::shared_ptr<RecomputedBytes> recomputed_bytes() = 0;
  /// Returns a function that records a result which a policy moves later than it keeps it. Any
  /// thread may call it, also when the frame is gone.
  virtual std::function<void()> late_move(int64_t bytes) = 0;
  /// A recompute brought back a result that a policy had moved.
  virtual void kept_was_loaded(int64_t bytes, bool was_ahead, double seconds) = 0;
};

}  // namespace remat
