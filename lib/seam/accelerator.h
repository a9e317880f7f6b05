#pragma once
// Which accelerator there is, and which of its devices are in use.

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include <optional>

namespace remat {

/// Finds the accelerator of this build, or one that a plug-in brought (PrivateUse1, at any time).
std::optional<c10::DeviceType> present_accelerator();

/// Its devices that are initialised; initialises none. Empty without an accelerator, or if its
/// plug-in does not tell.
c10::SmallVector<c10::Device, 2> devices_in_use();

/// Whether what this thread queues on the device becomes part of a graph instead of running.
/// `generator`: the device's.
bool is_capturing(const c10::Device& device, const at::Generator& generator);
/// The same of one stream.
bool is_capturing(const c10::Stream& stream);

}  // namespace remat
