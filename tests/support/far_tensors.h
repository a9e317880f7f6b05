#pragma once
// Tensors on the stand-in of tests/device/stand_in.h.

#include <chrono>
#include <thread>

#include "tests/device/stand_in.h"
#include "tests/support/support.h"

namespace remat::testing {

/// A leaf on the device with these values.
inline Tensor far_leaf(const Tensor& values, int index = 0) {
  return values.detach().to(stand_in::device(index)).requires_grad_();
}
/// A leaf on the device with random values.
inline Tensor leaf_on(int index, at::IntArrayRef sizes) {
  return far_leaf(at::randn(sizes), index);
}

/// Uninitialized memory of the device.
inline Tensor bytes_on(int index, int64_t bytes) {
  return at::empty({bytes}, at::TensorOptions(at::kByte).device(stand_in::device(index)));
}

/// Requires equal devices and equal bits.
inline void require_same(const Tensor& actual, const Tensor& expected) {
  REQUIRE(actual.device() == expected.device());
  require_bit_equal({actual.cpu()}, {expected.cpu()});
}

/// Returns the bytes of the device after its thread has released the last tensors of earlier
/// backwards. That thread releases them after a backward has returned, and before it runs the next.
inline int64_t settled_bytes() {
  const Tensor nothing = at::empty({0}, at::TensorOptions(stand_in::device())).requires_grad_();
  torch::autograd::grad({nothing.sin()}, {nothing}, {at::empty_like(nothing)});
  return stand_in::live_bytes();
}

/// True if the device comes to hold this many bytes: its thread releases the last tensors after a
/// backward has returned.
inline bool comes_to(int64_t bytes) {
  for (int i = 0; i < 2000 && stand_in::live_bytes() != bytes; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return stand_in::live_bytes() == bytes;
}

}  // namespace remat::testing
