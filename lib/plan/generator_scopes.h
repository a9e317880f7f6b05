#pragma once
// A scope after which a device's default generator stands where it stood before.

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <mutex>

namespace remat {

/// The default generator of a device stands afterwards where it stood before.
class DeviceGeneratorScope {
 public:
  explicit DeviceGeneratorScope(c10::Device device) {
    if (device.is_cpu()) return;
    generator_ = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator_.mutex());
    state_ = generator_.get_state().clone();
  }
  ~DeviceGeneratorScope() {
    if (!generator_.defined()) return;
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(state_);
  }
  DeviceGeneratorScope& operator=(DeviceGeneratorScope&&) = delete;

 private:
  at::Generator generator_;
  at::Tensor state_;
};

}  // namespace remat
