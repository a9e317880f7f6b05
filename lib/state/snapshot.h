#pragma once
// The ambient state of a region's forward, and its restoration around a recompute.

#include <c10/core/AutogradState.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <optional>

namespace remat {

/// The state of autocast as LibTorch stores it: per device type, and one cache flag.
struct AutocastState {
  struct Device {
    c10::DeviceType type;
    bool enabled;
    c10::ScalarType dtype;
    bool operator==(const Device&) const = default;
  };
  c10::SmallVector<Device, 2> devices;
  bool cache_enabled = true;

  static AutocastState now();
  void set() const;
  bool is_any_enabled() const;
  bool operator==(const AutocastState&) const = default;
};

/// Note [The default dtype]
/// The default dtype is one for the whole process, without a lock: a recompute that set it would
/// change computations of other threads. So it is only noted. A recompute that finds another one is
/// refused, after providers have restored their state. For tensors that are made inside and never
/// saved, no other check would see the difference. The number of threads within an operator is not
/// noted: where it decides how a sum is rounded, results differ by that, as they do between any two
/// runs.

/// The part of the surroundings that is constant during a forward, except random numbers (draws;
/// Rule 11). Taken when a region begins.
struct Snapshot {
  [[no_unique_address]] AutocastState autocast;
  /// See Note [The default dtype].
  c10::ScalarType default_dtype;
  c10::DispatchKeySet hidden;  ///< excluded dispatch keys of autograd and lazy views

  static Snapshot take();
  bool has_default_dtype() const;
};

/// Sets the ambient state to the snapshot's while alive; restores exactly the previous one.
class AmbientRestore {
 public:
  explicit AmbientRestore(const Snapshot& snapshot);
  ~AmbientRestore();
  AmbientRestore& operator=(AmbientRestore&&) = delete;

 private:
  std::optional<c10::InferenceMode> no_inference_;
  c10::AutogradState autograd_;
  AutocastState autocast_;
  bool has_cast_scope_;
  c10::DispatchKeySet transforms_;  // hidden from the recompute, as from forward
  c10::DispatchKeySet hidden_;      // e.g. in the kernel of an operator that runs a backward
};

}  // namespace remat
