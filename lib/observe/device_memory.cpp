// Bytes of an accelerator's tensors from its allocator's statistics; a limit that holds the rest.

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "lib/base/error.h"
#include "lib/observe/memory_source.h"
#include "lib/observe/recordings.h"
#include "lib/seam/device_allocator.h"

namespace remat {
namespace {

// Note [A limit by holding the rest]
// LibTorch has no limit that all accelerators share. The library's own allocation, which leaves
// only the room below the limit, serves as one: the next allocation that does not fit gets the
// device's own error. This held memory belongs to no tensor of the program, so counts exclude it.
//
// A tighter limit holds more memory in addition, so that allocations of other threads meanwhile
// still find the old limit. Held memory cannot shrink, so before a looser limit there is no limit
// for a moment.
class DeviceMemory final : public MemorySource {
 public:
  explicit DeviceMemory(c10::Device device) : device_(device) {
    if (const char* const cause = seam::why_memory_is_unknown(device))
      throw_unsupported(fmt::format("the bytes of device {} cannot be counted", device.str()),
                        cause,
                        "count the bytes of the CPU (a MemoryMeter without a device), or use the "
                        "device's own tools");
    one_byte();  // a device is used before it has statistics
  }

  int64_t live_bytes() const override {
    const std::lock_guard lock(mutex_);
    return seam::device_bytes(device_).live - num_held_;
  }
  int64_t start_peak() override {
    const std::lock_guard lock(mutex_);
    const int64_t last = seam::device_bytes(device_).peak - num_held_;
    seam::reset_device_peak(device_);
    return last;
  }
  int64_t peak_bytes() const override {
    const std::lock_guard lock(mutex_);
    return seam::device_bytes(device_).peak - num_held_;
  }
  int64_t num_failed() const override {
    const std::lock_guard lock(mutex_);
    return seam::device_bytes(device_).num_failed - num_own_failed_;
  }
  MemoryNow now() const override {
    const std::lock_guard lock(mutex_);
    const seam::DeviceBytes bytes = seam::device_bytes(device_);
    return {bytes.live - num_held_, bytes.peak - num_held_, bytes.num_failed - num_own_failed_};
  }
  std::optional<int64_t> free_bytes() override {
    const c10::DeviceGuard guard(device_);
    return seam::free_device_bytes(device_);
  }
  bool is_exact() const override {
    const at::Tensor something = one_byte();  // shows which numbers the allocator counts
    return seam::device_bytes(device_).are_requested;
  }
  void set_limit(int64_t bytes) override;

 private:
  at::Tensor one_byte() const {
    return at::empty({1}, at::TensorOptions(at::kByte).device(device_));
  }
  int64_t to_hold(int64_t limit) const;
  void hold(int64_t bytes);
  void release();

  const c10::Device device_;
  mutable std::mutex mutex_;  // counts exclude held memory, so both are read together
  std::vector<at::DataPtr> held_;
  int64_t num_held_ = 0;
  int64_t num_own_failed_ = 0;  // in the search for a piece to hold
};

void DeviceMemory::set_limit(int64_t bytes) {
  const c10::DeviceGuard guard(device_);
  const std::lock_guard lock(mutex_);
  if (bytes == no_limit) {
    release();
  } else {
    int64_t more = to_hold(bytes);
    if (more < 0) {
      release();
      more = to_hold(bytes);
    }
    hold(more);
  }
  seam::reset_device_peak(device_);  // without the held bytes
}

// Returns the bytes to hold in addition to those that are held.
int64_t DeviceMemory::to_hold(int64_t limit) const {
  const std::optional<int64_t> free = seam::free_device_bytes(device_);
  if (!free)
    throw_unsupported(fmt::format("device {} cannot be limited", device_.str()),
                      seam::why_free_is_unknown(),
                      "limit the CPU's memory, or set a limit with the device's own tools");
  return *free - std::max<int64_t>(limit - (seam::device_bytes(device_).live - num_held_), 0);
}

void DeviceMemory::release() {
  held_.clear();
  num_held_ = 0;
}

void DeviceMemory::hold(int64_t bytes) {
  const seam::DeviceBytes before = seam::device_bytes(device_);
  const auto own_failures = c10::make_scope_exit(
      [&] { num_own_failed_ += seam::device_bytes(device_).num_failed - before.num_failed; });
  const Writing writing;  // nor are they allocations of the program
  // Free memory need not be in one piece, nor free to the last byte.
  for (int64_t wanted = bytes; wanted > 0; wanted -= std::max<int64_t>(bytes / 64, 1)) {
    try {
      held_.push_back(c10::GetAllocator(device_.type())->allocate(static_cast<size_t>(wanted)));
      const seam::DeviceBytes now = seam::device_bytes(device_);
      // Another thread's allocations meanwhile do not count as held.
      num_held_ += now.are_requested ? wanted : now.live - before.live;
      return;
    } catch (const c10::OutOfMemoryError&) {
    }
  }
}

}  // namespace

MemorySource& device_memory(c10::Device device) {
  static std::mutex mutex;
  static auto& all = *new std::unordered_map<c10::Device, DeviceMemory*>;
  const std::lock_guard lock(mutex);
  const auto known = all.find(device);
  if (known != all.end()) return *known->second;
  return *all.emplace(device, new DeviceMemory(device)).first->second;
}

}  // namespace remat
