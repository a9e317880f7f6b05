#pragma once
// The ambient state that a region's forward ran in, and its restoration around a recompute.

#include <c10/core/AutogradState.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <optional>

namespace remat {

/// Autocast is noted as LibTorch keeps it: per device type, and one cache flag.
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
/// One for the whole process, without a lock: a recompute that set it would change what other
/// threads compute. So it is only noted, and a recompute that finds another one is refused, once
/// providers have restored what they restore. Of tensors that are made inside and never saved no
/// other check would see the difference. The number of threads within an operator is not noted:
/// where it decides how a sum is rounded, results differ by that, as they do between any two runs.

/// A snapshot is what a recompute sees as forward saw it, but for its random numbers (draws; Rule
/// 11). Taken when a region begins.
struct Snapshot {
  [[no_unique_address]] AutocastState autocast;
  /// See Note [The default dtype].
  c10::ScalarType default_dtype;
  c10::DispatchKeySet hidden;  ///< dispatch keys of autograd and lazy views that were excluded

  static Snapshot take();
  bool has_default_dtype() const;
};

/// While alive the ambient state is the snapshot's; then exactly what it was before.
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
  c10::DispatchKeySet transforms_;  // which the recompute sees as little as forward did
  c10::DispatchKeySet hidden_;      // in the kernel of an operator that runs a backward, say
};

}  // namespace remat
