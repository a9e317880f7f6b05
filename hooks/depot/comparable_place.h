#pragma once
// Places that can say whether memory still has what they were given, so that nobody need hash it
// first.

#include "remat/place.h"

namespace remat {

/// Contents of the CPU's memory.
class ComparableContents : public StoredContents {
 public:
  /// Whether `memory`, which is that of the tensor that was stored, has the bytes that are in the
  /// place, or will be: what is not copied yet is copied as it is by then. Waits for a copy that is
  /// being made. Any thread, also beside loads. False if it cannot be found out.
  virtual bool has_bytes_of(const void* memory) = 0;
};

/// What it makes of a tensor on the CPU are ComparableContents.
class ComparablePlace : public Place {};

}  // namespace remat
