#pragma once
// The states of device generators, and of registered ones other than CPU generators, at a region's
// begin, if it drew from them.

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

/// The devices of a region's tensors.
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
// Draws from a device's generator cannot be intercepted: many kernels take numbers from it
// themselves. A region's draws are detected because the generator has moved. Where every thread has
// a device of its own, another thread may have moved it. So the default generator of a device may
// be attributed to other threads: if the region has no tensor there (no input, no result, none that
// autograd saved), and other threads have claimed the device, but this one has not (device_claims).
// A registered generator always counts. Threads that draw from one generator at once are not
// distinguished, except for recomputes, which take turns.

/// The states at a region's begin of the generators that it drew from, once it is settled.
class DeviceRng {
 public:
  /// Returns null if there is no accelerator and `registered` has only CPU generators. Initializes
  /// no device.
  static std::unique_ptr<DeviceRng> take(c10::ArrayRef<at::Generator> registered);
  /// Adds the present state of a generator that was registered inside the region, unless it is a
  /// CPU generator.
  static void add(std::unique_ptr<DeviceRng>& kept, const at::Generator& registered);
  /// Returns the present states of these generators, and of the default ones of the devices in use.
  std::vector<GeneratorState> now() const;
  /// Returns the states of `now` that moved since `before`, or since a later registration. A
  /// recompute must restore each state that it sets, so these generators are not forgotten even if
  /// they return to their old state.
  std::vector<GeneratorState> moved(const std::vector<GeneratorState>& before,
                                    std::vector<GeneratorState> now, const DevicesMet& met);
  static GeneratorState present(at::Generator generator);
  static void set(const std::vector<GeneratorState>& states);
  /// Forgets the generators that never moved, and adds those of devices first used meanwhile.
  void settle(const DevicesMet& met);
  bool is_settled() const { return is_settled_; }
  bool is_empty() const { return states_.empty(); }
  /// Returns the states that a recompute sets: until it is settled, of all generators that the
  /// region may have drawn from so far.
  std::vector<GeneratorState> at_begin(const DevicesMet& met) const;

 private:
  const GeneratorState* find(const at::Generator& generator) const;
  bool has(const at::Generator& generator) const { return find(generator) != nullptr; }
  bool has_moved(const at::Generator& generator) const;
  /// Returns whether the region cannot have moved it.
  bool is_others(const at::Generator& generator, const DevicesMet& met) const;
  std::vector<GeneratorState> states_;
  std::vector<at::Generator> registered_;
  mutable std::mutex mutex_;
  std::vector<at::Generator> moved_inside_;  // until settled; guarded by mutex_
  c10::SmallVector<c10::Device, 2> used_before_;
  bool is_settled_ = false;
};

/// Sets the generators to their states at the region's begin while alive, then back. Waits for
/// other threads' recomputes that have set them.
class DeviceRngSwap {
 public:
  DeviceRngSwap(const std::vector<GeneratorState>& at_begin, const LockOwner& owner);
  ~DeviceRngSwap();
  /// Returns whether the generators did not become free in time, so that nothing was set.
  bool has_failed() const { return hold_.has_failed(); }
  DeviceRngSwap& operator=(DeviceRngSwap&&) = delete;

 private:
  const RecomputeHold hold_;
  std::vector<GeneratorState> before_;
};

}  // namespace remat
