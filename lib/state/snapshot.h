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

/// A snapshot is what a recompute sees as forward saw it, but for its random numbers (draws; Rule
/// 11). Taken when a region begins.
struct Snapshot {
  AutocastState autocast;
  c10::DispatchKeySet hidden;  ///< dispatch keys of autograd and lazy views that were excluded

  static Snapshot take();
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
  c10::DispatchKeySet hidden_;  // in the kernel of an operator that runs a backward, say
};

}  // namespace remat
