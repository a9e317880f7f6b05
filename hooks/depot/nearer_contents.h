#pragma once
// Contents that can come nearer before there is room for them where they are wanted.

#include <cstdint>

namespace remat {

/// Of a piece whose place has memory of the host between the device and something slower.
class NearerContents {
 public:
  /// [bytes] of the host's memory that `begin_approach` would take if nobody has begun it; 0: they
  /// are there. Any thread.
  virtual int64_t bytes_to_approach() const = 0;
  /// Begins to bring them to the host. `cancel_load` ends it.
  virtual void begin_approach() = 0;

 protected:
  ~NearerContents() = default;
};

}  // namespace remat
