#pragma once
// A generator that is none of LibTorch's: its numbers count up.

#include <ATen/ScalarOps.h>
#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include <cstdint>
#include <mutex>

namespace remat::testing {

/// A generator of the CPU, or of a device that this build does not have.
struct CountingGenerator final : c10::GeneratorImpl {
  int64_t position = 0;
  explicit CountingGenerator(at::Device device = at::kCPU)
      : GeneratorImpl(device, c10::DispatchKeySet()) {}
  double draw() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<double>(++position);
  }
  void set_current_seed(uint64_t) override {}
  void set_offset(uint64_t offset) override { position = static_cast<int64_t>(offset); }
  uint64_t get_offset() const override { return static_cast<uint64_t>(position); }
  uint64_t current_seed() const override { return 0; }
  uint64_t seed() override { return 0; }
  void set_state(const c10::TensorImpl& state) override {
    position = *static_cast<const int64_t*>(state.data());
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return at::scalar_tensor(position, at::kLong).getIntrusivePtr();
  }
  CountingGenerator* clone_impl() const override {
    auto* copy = new CountingGenerator(device());
    copy->position = position;
    return copy;
  }
};

}  // namespace remat::testing
