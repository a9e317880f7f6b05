#pragma once
// Tracks which threads run regions on which devices, to find the thread to which a generator's
// draws belong.

#include <c10/core/Device.h>

namespace remat {

/// Notes that this thread runs the forward of a region with a tensor on that device. Lasts as long
/// as the thread.
void claim(c10::Device device);
/// Returns whether other threads that are alive have claimed the device, and this one has not.
bool is_claimed_by_others(c10::Device device);

}  // namespace remat
