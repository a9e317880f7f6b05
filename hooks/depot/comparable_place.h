#pragma once
// Places that can compare memory with their stored contents, so that a depot need not hash it
// first.

#include "remat/place.h"

namespace remat {

/// Contents of the CPU's memory.
class ComparableContents : public StoredContents {
 public:
  /// Returns whether `memory`, the stored tensor's own memory, has the bytes of the place. Bytes
  /// that are not copied yet will be copied as they are then. Waits for a running copy. Returns
  /// false if the answer is unknown. Any thread, also beside loads.
  virtual bool has_bytes_of(const void* memory) = 0;
};

/// A place that makes ComparableContents of tensors on the CPU.
class ComparablePlace : public Place {};

}  // namespace remat
