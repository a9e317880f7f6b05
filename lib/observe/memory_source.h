#pragma once
// The bytes of one device's tensors: their counts and their limit.

#include <c10/core/Device.h>

#include <cstdint>
#include <limits>
#include <optional>

namespace remat {

class MemoryMeter;

/// All counts of a source at one moment.
struct MemoryNow {
  int64_t live_bytes = 0, peak_bytes = 0, num_failed = 0;
};

/// Counts the bytes of one device. Any thread may read; `start_peak` and `set_limit` have one
/// caller at a time. Lives until the process ends.
class MemorySource {
 public:
  static constexpr int64_t no_limit = std::numeric_limits<int64_t>::max();

  virtual int64_t live_bytes() const = 0;
  /// Returns the peak of `live_bytes()` since its last call, and starts a new one at the live
  /// bytes.
  virtual int64_t start_peak() = 0;
  virtual int64_t peak_bytes() const = 0;
  /// Returns whether bytes are those requested, not those that the allocator rounds them to.
  virtual bool is_exact() const = 0;
  /// Returns the number of allocations that did not fit so far, without those of the limit itself.
  virtual int64_t num_failed() const = 0;
  /// Returns live bytes, peak and failures at the price of one of them.
  virtual MemoryNow now() const = 0;
  /// Returns the bytes that allocations could take now; nothing if they are unknown.
  virtual std::optional<int64_t> free_bytes() = 0;
  /// Refuses allocations that would raise `live_bytes()` above `bytes`. May start a new peak.
  virtual void set_limit(int64_t bytes) = 0;

 protected:
  ~MemorySource() = default;
};

/// Returns the device with its index; without one, the current device of its type.
c10::Device with_index(c10::Device device);
/// Returns the CPU's memory. The first call installs the counting allocator.
MemorySource& cpu_memory();
/// Returns the memory of an accelerator's device, which has an index. Uses the device. Throws
/// `CheckpointError` (Unsupported) if its allocator has no statistics.
MemorySource& device_memory(c10::Device device);

/// Returns all counts of the meter's source, with the meter's own peak.
MemoryNow now_of(const MemoryMeter& meter);

}  // namespace remat
