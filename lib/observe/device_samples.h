#pragma once
// What is alive on an accelerator's devices: Note [Samples of a device].

#include "lib/observe/recording.h"

namespace remat {

/// Tells the recordings that want it what is alive on the devices in use, and was since the last
/// sample.
void sample_devices();
/// An allocation of so many bytes does not fit, says the device's allocator. Takes no lock.
void note_refused(c10::Device device, int64_t bytes);
/// A recording begins: what was before is none of its business.
void begin_samples(Recording& recording);

}  // namespace remat
