#include "lib/seam/accelerator.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <string_view>

#include "lib/seam/warn.h"

namespace remat {

// An accelerator that LibTorch was built with never changes, and asking for it is not free.
std::optional<c10::DeviceType> present_accelerator() {
  static const std::optional<c10::DeviceType> built_in = at::getAccelerator(/*checked=*/false);
  return built_in || !at::isPrivateUse1HooksRegistered() ? built_in
                                                         : at::getAccelerator(/*checked=*/false);
}

c10::SmallVector<c10::Device, 2> devices_in_use() {
  static std::atomic<bool> tells{true};
  c10::SmallVector<c10::Device, 2> devices;
  const auto type = present_accelerator();
  if (!type || !tells) return devices;
  try {
    const auto& hooks = at::globalContext().getAcceleratorHooksInterface(*type);
    // In a process that makes fake tensors, the device guard of LibTorch reports one device for a
    // kind that has none; the hooks of that kind report none.
    const c10::DeviceIndex count = type == c10::kPrivateUse1
                                       ? c10::impl::VirtualGuardImpl(*type).deviceCount()
                                       : hooks.deviceCount();
    for (c10::DeviceIndex i = 0; i < count; ++i)
      if (hooks.hasPrimaryContext(i)) devices.emplace_back(*type, i);
  } catch (const c10::Error& e) {
    tells = false;
    seam::warn(c10::str(
        "remat: the accelerator's plug-in does not report which devices are in use, so their ",
        "random states and streams are not restored in recomputes: ", e.what_without_backtrace()));
    devices.clear();
  }
  return devices;
}

namespace {

/// Newer LibTorch asks the stream. Older LibTorch refuses to copy a generator during a capture.
template <class Guard, class GeneratorOf>
bool is_capturing_on(const Guard& guard, const c10::Stream& stream,
                     const GeneratorOf& generator_of) {
  if constexpr (requires { guard.isStreamCapturing(stream); }) {
    return guard.isStreamCapturing(stream);
  } else {
    try {
      generator_of().clone();
      return false;
    } catch (const c10::Error& error) {
      return std::string_view(error.what()).find("captur") != std::string_view::npos;
    }
  }
}

}  // namespace

bool is_capturing(const c10::Device& device, const at::Generator& generator) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return is_capturing_on(guard, guard.getStream(device), [&] { return generator; });
}

bool is_capturing(const c10::Stream& stream) {
  return is_capturing_on(c10::impl::VirtualGuardImpl(stream.device_type()), stream, [&] {
    return at::globalContext()
        .getAcceleratorHooksInterface(stream.device_type())
        .getDefaultGenerator(stream.device_index());
  });
}

}  // namespace remat
