#pragma once
// Which threads work on which devices, as far as regions show it: whose generator one is.

#include <c10/core/Device.h>

namespace remat {

/// This thread runs the forward of a region with a tensor on that device. For as long as it lives.
void claim(c10::Device device);
/// Whether other threads that are alive have claimed the device, and this one has not.
bool is_claimed_by_others(c10::Device device);

}  // namespace remat
