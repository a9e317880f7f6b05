#include "lib/observe/device_samples.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "lib/observe/memory_source.h"
#include "lib/observe/recordings.h"
#include "lib/seam/accelerator.h"
#include "remat/error.h"
#include "remat/memory.h"

namespace remat {

namespace {

/// [bytes] of a refused allocation since the last sample, by device; -1: none was reported.
std::array<std::atomic<int64_t>, 64>& refused() {
  static auto& all = *[] {
    auto* const none = new std::array<std::atomic<int64_t>, 64>;
    for (auto& each : *none) each = -1;
    return none;
  }();
  return all;
}
std::atomic<int64_t>& refused_on(c10::Device device) {
  return refused()[static_cast<std::size_t>(std::clamp<int>(device.index(), 0, 63))];
}

/// The last sample of a device in use.
class SampledDevice {
 public:
  explicit SampledDevice(c10::Device device) : meter_(device), source_(device_memory(device)) {}

  /// Tells all recordings the live bytes, and the peak since the last sample.
  void sample() {
    const std::lock_guard lock(mutex_);
    // One question only: an allocator's answer is long, and given under its lock.
    const auto [live, peak, num_failed] = now_of(meter_);
    const c10::Device device = meter_.device();
    const int64_t asked = refused_on(device).exchange(-1);
    if (const bool fails = num_failed > std::exchange(num_failed_, num_failed); fails) {
      const FailedAllocation failed = KeptBytes::all().failed(device, asked, live);
      tell([&](Recording& each) { each.add(failed); });
    }
    const int64_t before = std::exchange(last_live_, live);
    const bool hides_peak = peak > std::max(before, live);
    if (hides_peak) meter_.reset_peak();
    if (live == before && !hides_peak) return;
    tell([&](Recording& each) {
      each.saw(device, is_exact_, std::max(live, peak));
      for (const int64_t bytes : {hides_peak ? peak : live, live}) {
        each.add({.kind = EventKind::Memory,
                  .device = device,
                  .bytes = KeptBytes::all().now(device, bytes)});
        if (!hides_peak) break;
      }
    });
  }
  /// Begins a recording, which ignores everything before.
  void forget(Recording& recording) {
    const std::lock_guard lock(mutex_);
    meter_.reset_peak();
    last_live_ = meter_.live_bytes();
    num_failed_ = source_.num_failed();
    recording.saw(meter_.device(), is_exact_, last_live_);
    recording.add({.kind = EventKind::Memory,
                   .device = meter_.device(),
                   .time_ns = 0,
                   .bytes = KeptBytes::all().now(meter_.device(), last_live_)});
  }

 private:
  template <class Visitor>
  static void tell(Visitor&& visitor) {
    recordings().visit([&](Recording& each) {
      if (each.options().memory) visitor(each);
    });
  }
  std::mutex mutex_;
  MemoryMeter meter_;
  MemorySource& source_;
  const bool is_exact_ = meter_.is_exact();
  int64_t last_live_ = -1, num_failed_ = source_.num_failed();
};

/// Returns the sampled device; null if its allocator has no statistics.
SampledDevice* sampled(c10::Device device) {
  static std::mutex mutex;
  static auto& all = *new std::unordered_map<c10::Device, SampledDevice*>;
  const std::lock_guard lock(mutex);
  const auto [known, is_new] = all.try_emplace(device, nullptr);
  if (is_new) {
    try {
      known->second = new SampledDevice(device);
    } catch (const CheckpointError&) {
    }
  }
  return known->second;
}

}  // namespace

void note_refused(c10::Device device, int64_t bytes) { refused_on(device) = bytes; }

void sample_devices() {
  if (Writing::is_here()) return;
  const Writing writing;
  for (const c10::Device device : devices_in_use())
    if (SampledDevice* const each = sampled(device)) each->sample();
}

void begin_samples(Recording& recording) {
  const Writing writing;
  for (const c10::Device device : devices_in_use())
    if (SampledDevice* const each = sampled(device)) each->forget(recording);
}

}  // namespace remat
