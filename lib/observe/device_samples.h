#pragma once
// Live bytes on the devices of an accelerator: see Note [Samples of a device].

#include "lib/observe/recording.h"

namespace remat {

/// Tells recordings that ask for memory the live bytes of the devices in use, and their peak since
/// the last sample.
void sample_devices();
/// Notes the bytes of an allocation that the device's allocator refused. Takes no lock.
void note_refused(c10::Device device, int64_t bytes);
/// Begins a recording, which ignores all samples before.
void begin_samples(Recording& recording);

}  // namespace remat
