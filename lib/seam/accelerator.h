#pragma once
// Finds the accelerator, and its devices in use.

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include <optional>

namespace remat {

/// Returns the accelerator of this build, or one that a plug-in registered (PrivateUse1, at any
/// time).
std::optional<c10::DeviceType> present_accelerator();

/// Returns the initialized devices of the accelerator, and initializes none. Empty without an
/// accelerator, or if its plug-in does not report them.
c10::SmallVector<c10::Device, 2> devices_in_use();

/// Returns whether work that this thread queues on the device is captured into a graph instead of
/// run. `generator`: the device's.
bool is_capturing(const c10::Device& device, const at::Generator& generator);
/// Returns whether work queued on the stream is captured into a graph instead of run.
bool is_capturing(const c10::Stream& stream);

}  // namespace remat
