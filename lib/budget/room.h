#pragma once
// Room in budgets: before allocations that are announced, and before operators on accelerators.

#include <c10/core/Device.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

#include "lib/budget/runtime.h"

namespace remat::budget {

/// Makes room in all budgets of the device before an allocation of `bytes`. `in_allocator`: an
/// allocator has called, so that the thread cannot run operators. Throws BudgetExceeded.
/// Defined in guard.cpp, since it reads the scopes of the thread.
void announce(c10::Device device, int64_t bytes, int64_t live_bytes, bool in_allocator);

/// Makes room before one operator call, and counts its bytes: see Note [Room on accelerators].
class RoomForCall {
 public:
  /// `call`: hash of operator and shapes. Throws BudgetExceeded.
  RoomForCall(Runtime& runtime, uint64_t call);
  /// Records the bytes that the call took. Call after the operator has returned.
  void end();

 private:
  struct Place {
    const Bound* bound;
    uint64_t call;
    int64_t expected_bytes, live_bytes, peak_bytes;
  };
  Runtime& runtime_;
  c10::SmallVector<Place, 1> places_;
};

}  // namespace remat::budget
