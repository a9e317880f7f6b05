#pragma once
// The kept and recomputed bytes of recorded regions, by device: for pictures, and for allocations
// that fail.

#include <c10/core/Device.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "lib/frame/recorded_frame.h"
#include "remat/report.h"

namespace c10 {
struct StorageImpl;
}

namespace remat {

/// [bytes] alive by kind. The rest of `live` is of no kind.
struct LiveKinds {
  int64_t live = 0, parameters = 0, inputs = 0, saved = 0, recomputed = 0;
};

/// The bytes recomputed for one region by device. Any thread.
class RecomputedBytesByDevice final : public RecomputedBytes {
 public:
  void add(c10::Device device, int64_t bytes) override;
  int64_t on(c10::Device device) const;

 private:
  mutable std::mutex mutex_;
  std::vector<DeviceBytes> bytes_;
};

/// The bytes that one region keeps, from its begin until its graph is gone.
struct KeptOfRegion {
  int64_t id = -1;  ///< of the region's frame
  std::shared_ptr<const std::string> name;
  std::vector<KeptStorage> inputs;
  std::vector<DeviceBytes> saved;
  std::shared_ptr<RecomputedBytesByDevice> recomputed = std::make_shared<RecomputedBytesByDevice>();
};

/// The kept bytes of all recorded regions of the process. Any thread.
class KeptBytes {
 public:
  static KeptBytes& all();

  /// Adds a region, whose inputs do not change from here on.
  void add(const KeptOfRegion& region);
  void remove(const KeptOfRegion& region);
  /// Sets the bytes that a policy kept in the region.
  void set_saved(KeptOfRegion& region, std::vector<DeviceBytes> saved);
  void add_parameter(const KeptStorage& parameter);
  void forget_parameters();
  void add_recomputed(c10::Device device, int64_t bytes);

  LiveKinds now(c10::Device device, int64_t live) const;
  /// Describes a failed allocation: the live bytes by region name, the most bytes first.
  FailedAllocation failed(c10::Device device, int64_t asked, int64_t live) const;

 private:
  struct Sums {
    std::atomic<int64_t> parameters{0}, inputs{0}, saved{0}, recomputed{0};
  };
  // The CPU, and the devices of the present accelerator.
  static constexpr std::size_t num_places = 65;
  static std::size_t place_of(c10::Device device);
  Sums& sums(c10::Device device) { return sums_[place_of(device)]; }

  mutable std::mutex mutex_;                                     // of all members but the sums
  std::map<int64_t, const KeptOfRegion*> regions_;               // in the order of their begins
  std::unordered_map<const c10::StorageImpl*, int64_t> owners_;  // each storage once
  std::unordered_map<const c10::StorageImpl*, DeviceBytes> parameters_;
  std::array<Sums, num_places> sums_;
};

}  // namespace remat
