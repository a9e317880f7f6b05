#pragma once
// Scopes after which default generators stand where they stood before.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <mutex>

#include "lib/seam/cpu_generator.h"

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

/// The same of the CPU's.
class GeneratorScope {
 public:
  GeneratorScope() : generator_(default_cpu_generator()) {
    const std::lock_guard lock(generator_.mutex_);  // a stage takes it too
    state_ = state_of(generator_);
  }
  ~GeneratorScope() {
    const std::lock_guard lock(generator_.mutex_);
    set_state(generator_, *state_);
  }
  GeneratorScope& operator=(GeneratorScope&&) = delete;

 private:
  at::CPUGeneratorImpl& generator_;
  std::shared_ptr<const CpuRngState> state_;
};

}  // namespace remat
