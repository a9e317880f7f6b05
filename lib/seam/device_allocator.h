#pragma once
// What the allocator of an accelerator says about its memory.

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

namespace remat::seam {

/// Why a device's allocator cannot be asked: a clause for an error's cause; null if it can be.
const char* why_memory_is_unknown(c10::Device device);

/// [bytes] of a device's tensors.
struct DeviceBytes {
  int64_t live = 0, peak = 0;                  ///< peak: since the last reset
  bool are_requested = true;                   ///< `false`: as the allocator rounds them
  int64_t rounded_live = 0, rounded_peak = 0;  ///< the same as the allocator rounds them
  int64_t num_failed = 0;                      ///< allocations that did not fit, since it began
};
/// The allocator's statistics. Only where memory is known, and the device has been used.
DeviceBytes device_bytes(c10::Device device);
/// Starts the allocator's peak at what is alive; for everybody who reads it.
void reset_device_peak(c10::Device device);

/// [bytes] that the device has free, once the allocator has given back what it caches and nobody
/// uses; nothing if it does not say.
std::optional<int64_t> free_device_bytes(c10::Device device);
/// Why that may say nothing, of any device: a clause for an error's cause.
const char* why_free_is_unknown();

}  // namespace remat::seam
