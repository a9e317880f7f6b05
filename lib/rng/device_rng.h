#pragma once
// Generators of devices, and registered ones that are no CPU generators: kept as they were when a
// region began, if it drew from them.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "lib/base/recompute_lock.h"

namespace remat {

struct GeneratorState {
  at::Generator generator;
  at::Tensor state;
};

/// The devices that tensors of a region are on.
class DevicesMet {
 public:
  void add(c10::Device device) {
    if (!device.is_cpu() && !has(device)) devices_.push_back(device);
  }
  void add(const at::Tensor& tensor) {
    if (tensor.defined()) add(tensor.device());
  }
  bool has(c10::Device device) const {
    return std::find(devices_.begin(), devices_.end(), device) != devices_.end();
  }

 private:
  c10::SmallVector<c10::Device, 2> devices_;
};

// Note [Whose numbers]
// What draws from a device's generator passes nothing that could be asked: many kernels take
// numbers from it themselves. That a region drew is seen because the generator has moved; where
// every thread has a device of its own, another thread may have moved it. So the default generator
// of a device on which the region has no tensor (no input, no result, none that autograd saved) is
// taken for another thread's if other threads have shown that they work there, and this one has not
// (device_claims). A registered generator always counts. Threads that draw from one generator at
// once are not told apart, but for recomputes, which take turns at it.

/// A region keeps the states at its begin of the generators that it drew from, once it is settled.
class DeviceRng {
 public:
  /// Returns null where there is neither an accelerator nor anything in `registered` but CPU
  /// generators. No device is initialised.
  static std::unique_ptr<DeviceRng> take(c10::ArrayRef<at::Generator> registered);
  /// A generator that was registered inside the region, as it is now; none if it is a CPU
  /// generator.
  static void add(std::unique_ptr<DeviceRng>& kept, const at::Generator& registered);
  /// Reads the present states of these generators, and of the default ones of the devices in use.
  std::vector<GeneratorState> now() const;
  /// Returns those of `now` that moved since `before`, or since they were registered if that was
  /// later. What a recompute sets it must put back, so they stay here even if they return to where
  /// they were.
  std::vector<GeneratorState> moved(const std::vector<GeneratorState>& before,
                                    std::vector<GeneratorState> now, const DevicesMet& met);
  static GeneratorState present(at::Generator generator);
  static void set(const std::vector<GeneratorState>& states);
  /// Forgets the generators that never moved; adds those of devices first used meanwhile.
  void settle(const DevicesMet& met);
  bool is_settled() const { return is_settled_; }
  bool is_empty() const { return states_.empty(); }
  /// The states that a recompute sets: until it is settled, of all generators that the region may
  /// have drawn from so far.
  std::vector<GeneratorState> at_begin(const DevicesMet& met) const;

 private:
  const GeneratorState* find(const at::Generator& generator) const;
  bool has(const at::Generator& generator) const { return find(generator) != nullptr; }
  bool has_moved(const at::Generator& generator) const;
  /// Whether it cannot be the region that moved it.
  bool is_others(const at::Generator& generator, const DevicesMet& met) const;
  std::vector<GeneratorState> states_;
  std::vector<at::Generator> registered_;
  mutable std::mutex mutex_;
  std::vector<at::Generator> moved_inside_;  // until settled; guarded by mutex_
  c10::SmallVector<c10::Device, 2> used_before_;
  bool is_settled_ = false;
};

/// While alive the generators stand where the region began; then again where they were. Waits for
/// the recomputes of other threads that have set them.
class DeviceRngSwap {
 public:
  DeviceRngSwap(const std::vector<GeneratorState>& at_begin, const LockOwner& owner);
  ~DeviceRngSwap();
  /// The generators did not become free in time: nothing was set.
  bool has_failed() const { return hold_.has_failed(); }
  DeviceRngSwap& operator=(DeviceRngSwap&&) = delete;

 private:
  const RecomputeHold hold_;
  std::vector<GeneratorState> before_;
};

}  // namespace remat
