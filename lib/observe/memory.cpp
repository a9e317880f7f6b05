// The meter and the limit of a device's memory.

#include "remat/memory.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

#include "lib/base/error.h"
#include "lib/observe/kept_bytes.h"
#include "lib/observe/memory_source.h"
#include "lib/seam/device_allocator.h"

namespace remat {

// The state that meters and guards of one device share. Leaked, like the source: tensors outlive
// static objects.
struct detail::MeteredDevice {
  MemorySource& source;
  std::mutex mutex{};  // of the members below
  std::map<const MemoryMeter*, int64_t>
      peaks{};                      // of all meters that are alive, but for the last's
  std::multiset<int64_t> limits{};  // of all guards that are alive
  int64_t applied_limit = MemorySource::no_limit;

  static MeteredDevice& of(c10::Device device) {
    // The CPU needs no lock: every event of a recorder asks for it.
    static MeteredDevice& cpu = *new MeteredDevice{cpu_memory()};
    if (device.is_cpu()) return cpu;
    static std::mutex mutex;
    static auto& others = *new std::unordered_map<c10::Device, MeteredDevice*>;
    MemorySource& source = device_memory(device);
    const std::lock_guard lock(mutex);
    MeteredDevice*& found = others[device];
    if (found == nullptr) found = new MeteredDevice{source};
    return *found;
  }

  // Note [Meters share one peak]
  // Allocations raise one peak, which is cheap with any number of meters. Whenever a meter starts
  // afresh, the peaks of all other meters are raised to the shared one, which then starts afresh.
  void start_peak() {
    const int64_t last = source.start_peak();
    for (auto& [meter, peak] : peaks) peak = std::max(peak, last);
  }

  void apply_limit() {
    const int64_t smallest = limits.empty() ? MemorySource::no_limit : *limits.begin();
    // Setting the same limit anew would leave other threads without one for a moment.
    if (smallest == applied_limit) return;
    start_peak();  // setting a limit may start one
    source.set_limit(smallest);
    applied_limit = smallest;
  }
};

namespace {

int64_t checked_limit(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes >= 0, "remat::MemoryLimitGuard: the limit must be at least 0 bytes, got ",
                    bytes, ".");
  return bytes;
}

}  // namespace

c10::Device with_index(c10::Device device) {
  if (device.is_cpu()) return c10::Device(c10::kCPU);
  if (device.has_index()) return device;
  return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

MemoryNow now_of(const MemoryMeter& meter) {
  detail::MeteredDevice& shared = detail::MeteredDevice::of(meter.device());
  const std::lock_guard lock(shared.mutex);
  MemoryNow now = shared.source.now();
  now.peak_bytes = std::max(now.peak_bytes, shared.peaks.at(&meter));
  return now;
}

MemoryMeter::MemoryMeter() : MemoryMeter(c10::Device(c10::kCPU)) {}

MemoryMeter::MemoryMeter(c10::Device device)
    : device_(with_index(device)), shared_(detail::MeteredDevice::of(device_)) {
  {
    const std::lock_guard lock(shared_.mutex);
    shared_.peaks.emplace(this, 0);
  }
  reset_peak();
}

MemoryMeter::~MemoryMeter() {
  const std::lock_guard lock(shared_.mutex);
  shared_.peaks.erase(this);
}

bool MemoryMeter::is_exact() const { return shared_.source.is_exact(); }

int64_t MemoryMeter::live_bytes() const { return shared_.source.live_bytes(); }

int64_t MemoryMeter::peak_bytes() const {
  const std::lock_guard lock(shared_.mutex);
  return std::max(shared_.peaks.at(this), shared_.source.peak_bytes());
}

void MemoryMeter::reset_peak() {
  const std::lock_guard lock(shared_.mutex);
  shared_.start_peak();
  shared_.peaks.at(this) = 0;
}

MemoryLimitGuard::MemoryLimitGuard(int64_t bytes)
    : MemoryLimitGuard(bytes, c10::Device(c10::kCPU)) {}

MemoryLimitGuard::MemoryLimitGuard(int64_t bytes, c10::Device device)
    : bytes_(checked_limit(bytes)), shared_(detail::MeteredDevice::of(with_index(device))) {
  const std::lock_guard lock(shared_.mutex);
  const auto own = shared_.limits.insert(bytes);
  try {
    shared_.apply_limit();
  } catch (...) {
    shared_.limits.erase(own);
    throw;
  }
  recording::num_alive.fetch_add(1);  // an error lists the bytes of regions, recorder or not
}

MemoryLimitGuard::~MemoryLimitGuard() {
  const std::lock_guard lock(shared_.mutex);
  shared_.limits.erase(shared_.limits.find(bytes_));
  shared_.apply_limit();
  if (recording::num_alive.fetch_sub(1) == 1) KeptBytes::all().forget_parameters();
}

int64_t free_bytes(c10::Device device) {
  device = with_index(device);
  const std::optional<int64_t> free = detail::MeteredDevice::of(device).source.free_bytes();
  if (free) return *free;
  throw_unsupported(
      fmt::format("the free memory of device {} is not known", device.str()),
      device.is_cpu()
          ? "no MemoryLimitGuard is alive, and without a limit all programs share the memory"
          : seam::why_free_is_unknown(),
      "set a number of bytes");
}

}  // namespace remat
