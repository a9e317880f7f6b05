#pragma once
// What counts the bytes of one device's tensors, and limits them.

#include <c10/core/Device.h>

#include <cstdint>
#include <limits>
#include <optional>

namespace remat {

class MemoryMeter;

/// All that a source knows of one moment.
struct MemoryNow {
  int64_t live_bytes = 0, peak_bytes = 0, num_failed = 0;
};

/// Counts the bytes of one device. Any thread may read; `start_peak` and `set_limit` have one
/// caller at a time. Lives until the process ends.
class MemorySource {
 public:
  static constexpr int64_t no_limit = std::numeric_limits<int64_t>::max();

  virtual int64_t live_bytes() const = 0;
  /// Returns the most `live_bytes()` since its last call, and starts anew at what is alive now.
  virtual int64_t start_peak() = 0;
  virtual int64_t peak_bytes() const = 0;
  /// Whether bytes are those asked for; if not, they are as the allocator rounds them.
  virtual bool is_exact() const = 0;
  /// Counts the allocations that did not fit so far, but for the limit's own.
  virtual int64_t num_failed() const = 0;
  /// The same three at the price of one.
  virtual MemoryNow now() const = 0;
  /// [bytes] that allocations could take now; nothing if that is not known.
  virtual std::optional<int64_t> free_bytes() = 0;
  /// Refuses allocations that would take `live_bytes()` above `bytes`. May start the peak anew.
  virtual void set_limit(int64_t bytes) = 0;

 protected:
  ~MemorySource() = default;
};

/// Returns the device with its index; without one, the current device of its type.
c10::Device with_index(c10::Device device);
/// Installs the counting allocator when it is first called.
MemorySource& cpu_memory();
/// Of an accelerator's device, which has an index. Uses the device. Throws `CheckpointError`
/// (Unsupported) if its allocator does not tell.
MemorySource& device_memory(c10::Device device);

/// All that a meter's source knows now, with the meter's own peak.
MemoryNow now_of(const MemoryMeter& meter);

}  // namespace remat
