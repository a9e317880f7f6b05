#include "lib/seam/device_allocator.h"

#include <c10/core/Allocator.h>

#if __has_include(<c10/core/CachingDeviceAllocator.h>)
#include <c10/core/CachingDeviceAllocator.h>
#endif

// Declared here for LibTorch before 2.9, which does not define it.
namespace c10 {
struct DeviceAllocator;
}

namespace remat::seam {

namespace {

constexpr bool is_requested_kind(int64_t requested, int64_t allocated) {
  return requested != 0 || allocated == 0;
}

// A template, so that names that LibTorch lacks are not looked up.
template <class Allocator>
struct Asked {
  static constexpr bool is_known = requires { sizeof(Allocator); };

  static Allocator* of(c10::Device device) {
    if constexpr (is_known)
      return dynamic_cast<Allocator*>(c10::GetAllocator(device.type()));
    else
      return nullptr;
  }

  static DeviceBytes bytes(c10::Device device) {
    if constexpr (is_known) {
      const auto stats = of(device)->getDeviceStats(device.index());
      const auto& requested = stats.requested_bytes[0];  // of both pools together
      const auto& allocated = stats.allocated_bytes[0];
      // An allocator that does not count requests leaves all of their numbers 0.
      const bool are_requested = is_requested_kind(requested.current, allocated.current) &&
                                 is_requested_kind(requested.peak, allocated.peak);
      const auto& told = are_requested ? requested : allocated;
      return {.live = told.current,
              .peak = told.peak,
              .are_requested = are_requested,
              .rounded_live = allocated.current,
              .rounded_peak = allocated.peak,
              .num_failed = stats.num_ooms};
    } else {
      return {};
    }
  }

  static void reset_peak(c10::Device device) {
    if constexpr (is_known) of(device)->resetPeakStats(device.index());
  }

  static constexpr bool tells_free =
      requires(Allocator& a, c10::DeviceIndex index) { a.getMemoryInfo(index); };

  static std::optional<int64_t> free_bytes(c10::Device device) {
    if constexpr (is_known) {
      if constexpr (tells_free) {
        try {
          of(device)->emptyCache();
          return static_cast<int64_t>(of(device)->getMemoryInfo(device.index()).first);
        } catch (const c10::NotImplementedError&) {
        }
      }
    }
    return std::nullopt;
  }
};
using AskedAllocator = Asked<c10::DeviceAllocator>;

}  // namespace

const char* why_memory_is_unknown(c10::Device device) {
  if (!AskedAllocator::is_known)
    return "LibTorch before 2.9 cannot report how many bytes an accelerator holds";
  if (AskedAllocator::of(device) == nullptr)
    return "the device's allocator is not a c10::DeviceAllocator, so it has no statistics";
  return nullptr;
}
DeviceBytes device_bytes(c10::Device device) { return AskedAllocator::bytes(device); }
void reset_device_peak(c10::Device device) { AskedAllocator::reset_peak(device); }
std::optional<int64_t> free_device_bytes(c10::Device device) {
  return AskedAllocator::free_bytes(device);
}
const char* why_free_is_unknown() {
  return AskedAllocator::tells_free ? "its allocator does not report how much memory is free"
                                    : "LibTorch before 2.10 cannot report how much memory is free";
}

}  // namespace remat::seam
