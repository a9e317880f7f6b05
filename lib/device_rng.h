#pragma once
// Generators of devices, and registered ones that are no CPU generators: kept as they were when a
// region began, if it drew from them.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <mutex>
#include <vector>

namespace remat {

struct GeneratorState {
  at::Generator generator;
  at::Tensor state;
};

/// Of a region: the states at its begin of the generators it drew from, once it is settled. Others
/// that draw from a device's generator meanwhile are not told apart; a device usually belongs to one
/// thread.
class DeviceRng {
 public:
  /// Null where there is neither an accelerator nor anything in `registered` but CPU generators. No
  /// device is initialised.
  static std::unique_ptr<DeviceRng> take(c10::ArrayRef<at::Generator> registered);
  /// A generator that was registered inside the region, as it is now; none if it is a CPU generator.
  static void add(std::unique_ptr<DeviceRng>& kept, const at::Generator& registered);
  /// The present states of these generators, and of the default ones of the devices in use.
  std::vector<GeneratorState> now() const;
  /// Those of `now` that moved since `before`, or since they were registered if that was later. What a
  /// recompute sets it must put back, so they stay here even if they return to where they were.
  std::vector<GeneratorState> moved(const std::vector<GeneratorState>& before,
                                    std::vector<GeneratorState> now);
  static GeneratorState present(at::Generator generator);
  static void set(const std::vector<GeneratorState>& states);
  /// Forgets the generators that never moved; adds those of devices first used meanwhile.
  void settle();
  bool is_empty() const { return states_.empty(); }

 private:
  friend class DeviceRngSwap;
  bool has(const at::Generator& generator) const;
  bool has_moved(const at::Generator& generator) const;
  std::vector<GeneratorState> states_;
  std::mutex mutex_;
  std::vector<at::Generator> moved_inside_;  // until settled; guarded by mutex_
  c10::SmallVector<c10::Device, 2> used_before_;
};

/// While alive the generators stand where the region began; then again where they were. Null: none.
class DeviceRngSwap {
 public:
  explicit DeviceRngSwap(const DeviceRng* kept);
  ~DeviceRngSwap();
  DeviceRngSwap(const DeviceRngSwap&) = delete;
  DeviceRngSwap& operator=(const DeviceRngSwap&) = delete;

 private:
  std::vector<GeneratorState> before_;
};

}  // namespace remat
