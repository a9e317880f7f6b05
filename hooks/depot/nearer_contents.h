#pragma once
// Contents that can move to the host's memory before their device has room.

#include <cstdint>

namespace remat {

/// The contents of a place that has host memory between the device and slower storage.
class NearerContents {
 public:
  /// Returns the bytes of host memory that `begin_approach` would take, if it has not begun; 0 if
  /// the contents are on the host. Any thread.
  virtual int64_t bytes_to_approach() const = 0;
  /// Begins to load the contents to the host. `cancel_load` cancels it.
  virtual void begin_approach() = 0;

 protected:
  ~NearerContents() = default;
};

}  // namespace remat
