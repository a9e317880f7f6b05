#pragma once
// A scope that restores the position of a device's default generator.

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <mutex>

namespace remat {

/// Restores the position of a device's default generator at its end.
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
