#pragma once
// The byte statistics of an accelerator's allocator. LibTorch before 2.9 does not ask for them.

#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/version.h>

#include <cstdint>

namespace remat::testing {

inline int num_devices(c10::DeviceType type) {
  return c10::impl::VirtualGuardImpl(type).deviceCount();
}

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
inline constexpr bool has_device_stats = true;
inline int64_t device_bytes(c10::DeviceIndex index) {
  return at::accelerator::getDeviceStats(index).allocated_bytes[0].current;
}
inline int64_t device_peak_bytes(c10::DeviceIndex index) {
  return at::accelerator::getDeviceStats(index).allocated_bytes[0].peak;
}
inline void reset_device_peak(c10::DeviceIndex index) { at::accelerator::resetPeakStats(index); }
#else
inline constexpr bool has_device_stats = false;
inline int64_t device_bytes(c10::DeviceIndex) { return 0; }
inline int64_t device_peak_bytes(c10::DeviceIndex) { return 0; }
inline void reset_device_peak(c10::DeviceIndex) {}
#endif

}  // namespace remat::testing
