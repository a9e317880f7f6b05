#pragma once
// What the recomputes of a region must see as its forward saw it: taken at its begin, added to
// inside.

#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <any>
#include <memory>
#include <vector>

#include "lib/rng/device_rng.h"
#include "lib/rng/draws.h"
#include "lib/state/snapshot.h"
#include "lib/state/streams.h"
#include "lib/state/user_state.h"
#include "lib/tensor/capture.h"

namespace remat {

/// Where all generators of a region stood before an interval of its forward, and what recomputes
/// that do not run the interval must do: pass over draws of CPU generators (in the order of
/// Surroundings::draw_logs), set others.
struct DrawMarks {
  std::vector<DrawMark> logs;
  std::vector<GeneratorState> others;
};
struct DrawSkips {
  std::vector<DrawSkip> logs;
  std::vector<GeneratorState> others;
};

/// The surroundings of one region are what its recomputes must see (Rule 11). They change on
/// the thread that runs the region's forward only.
class Surroundings {
 public:
  using MeetDevices = c10::function_ref<DevicesMet()>;  ///< those of the region's tensors

  explicit Surroundings(bool preserves_rng) : preserves_rng_(preserves_rng) {}
  /// The region begins; its inputs are saved. `own`: what it registers itself, or null. Calls user
  /// code, and throws what that throws.
  void begin(const StorageSet& inputs, const std::shared_ptr<const UserRegistrations>& own);
  /// Its function has returned.
  void settle(MeetDevices met);
  /// Settles the state of modules, when it is known which batch norms ran.
  void settle_state() {
    if (user_state_) user_state_->settle();
  }

  const Snapshot& snapshot() const { return snapshot_; }
  const CurrentStreams* streams() const {
    return devices_ == nullptr ? nullptr : devices_->streams.get();
  }
  /// The state is null if no guard of state.h was around or in the region.
  const UserState* user_state() const { return user_state_.get(); }
  /// A recompute sets the generators of devices to these states.
  std::vector<GeneratorState> device_states(MeetDevices met) const;

  /// Returns null if draws from that generator do not matter, or nobody has registered it.
  DrawLog* draw_log(const c10::GeneratorImpl& generator);
  /// The same; a generator that nobody has registered is noted from here on: the region's function,
  /// which runs on this thread, has it from elsewhere and draws from it for the first time.
  DrawLog* draw_log_from_here(const c10::GeneratorImpl& generator);
  /// Returns the logs of all generators whose draws are noted: the default one's first, always in
  /// the same order.
  c10::SmallVector<DrawLog*, 1> draw_logs();
  template <class Visitor>
  void visit_draw_logs(Visitor&& visitor) {
    if (!preserves_rng_) return;
    visitor(draws_);
    if (user_state_ != nullptr)
      for (const auto& log : user_state_->draw_logs()) visitor(*log);
  }
  /// Whether a thread drew whose numbers cannot come again.
  bool has_new_drawer() const { return preserves_rng_ && draws_.has_new_drawer(); }
  DrawMarks marks();
  /// `met`: the devices of what ran since the marks, without region around it.
  DrawSkips since(const DrawMarks& marks, const DevicesMet& met);

  /// A guard of state.h was opened inside the region.
  void guard_opened(const UserRegistrations& opened, const std::vector<std::any>& states);
  /// What may own other regions, to die elsewhere.
  std::unique_ptr<UserState> release() { return std::move(user_state_); }

 private:
  struct Devices {
    std::unique_ptr<CurrentStreams> streams;
    std::unique_ptr<DeviceRng> rng;
  };
  UserState& user_state_or_make();
  Devices& devices_or_make();
  DeviceRng* device_rng() const { return devices_ == nullptr ? nullptr : devices_->rng.get(); }

  Snapshot snapshot_;
  [[no_unique_address]] DrawLog draws_{default_cpu_generator()};
  const bool preserves_rng_;          // in the last word of the log
  std::unique_ptr<Devices> devices_;  // null where no device is in use
  std::unique_ptr<UserState> user_state_;
};

}  // namespace remat
