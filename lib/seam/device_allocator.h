#pragma once
// Memory statistics of an accelerator's allocator.

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

namespace remat::seam {

/// Returns why a device's allocator cannot be asked, as a clause for an error's cause; null if it
/// can be.
const char* why_memory_is_unknown(c10::Device device);

/// Bytes of a device's tensors.
struct DeviceBytes {
  int64_t live = 0, peak = 0;                  ///< peak: since the last reset
  bool are_requested = true;                   ///< `false`: as the allocator rounds them
  int64_t rounded_live = 0, rounded_peak = 0;  ///< as the allocator rounds them
  int64_t num_failed = 0;                      ///< allocations that did not fit, since it began
};
/// Returns the allocator's statistics. Requires that memory is known and the device has been used.
DeviceBytes device_bytes(c10::Device device);
/// Resets the allocator's peak to the live bytes, for all its readers.
void reset_device_peak(c10::Device device);

/// Returns the free bytes of the device after the allocator has released its unused cache; empty if
/// it does not report them.
std::optional<int64_t> free_device_bytes(c10::Device device);
/// Returns why free_device_bytes() may be empty for any device, as a clause for an error's cause.
const char* why_free_is_unknown();

}  // namespace remat::seam
