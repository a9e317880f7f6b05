#pragma once
// The surroundings that a region's recomputes must see as its forward did: taken at its begin,
// extended inside.

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

/// The positions of a region's generators before an interval of its forward, and the way for
/// recomputes that do not run the interval to pass it: skip draws of CPU generators (in the order
/// of Surroundings::draw_logs), set others.
struct DrawMarks {
  std::vector<DrawMark> logs;
  std::vector<GeneratorState> others;
};
struct DrawSkips {
  std::vector<DrawSkip> logs;
  std::vector<GeneratorState> others;
};

/// The surroundings of one region (Rule 11). They change only on the thread that runs the region's
/// forward.
class Surroundings {
 public:
  using MeetDevices = c10::function_ref<DevicesMet()>;  ///< those of the region's tensors

  explicit Surroundings(bool preserves_rng) : preserves_rng_(preserves_rng) {}
  /// Takes the surroundings when the region begins and its inputs are saved. `own`: the region's
  /// own registrations, or null. Calls user code, and throws its exceptions.
  void begin(const StorageSet& inputs, const std::shared_ptr<const UserRegistrations>& own);
  /// Settles the draws and generators. Call it when the region's function has returned.
  void settle(MeetDevices met);
  /// Settles the state of modules. Call it when it is known which batch norms ran.
  void settle_state() {
    if (user_state_) user_state_->settle();
  }

  const Snapshot& snapshot() const { return snapshot_; }
  const CurrentStreams* streams() const {
    return devices_ == nullptr ? nullptr : devices_->streams.get();
  }
  /// Returns the user's state; null if no guard of state.h was around or in the region.
  const UserState* user_state() const { return user_state_.get(); }
  /// Returns the states to which a recompute sets the generators of devices.
  std::vector<GeneratorState> device_states(MeetDevices met) const;

  /// Returns the log of a generator; null if its draws do not matter, or it is not registered.
  DrawLog* draw_log(const c10::GeneratorImpl& generator);
  /// Returns the log of a generator, and begins one for an unregistered generator: the region's
  /// function, which runs on this thread, draws from it for the first time.
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
  /// Returns whether a thread drew whose numbers cannot be repeated.
  bool has_new_drawer() const { return preserves_rng_ && draws_.has_new_drawer(); }
  DrawMarks marks();
  /// Returns the draws since the marks. `met`: the devices of the function that ran since then
  /// outside any region.
  DrawSkips since(const DrawMarks& marks, const DevicesMet& met);

  /// Adds the state of a guard of state.h that was opened inside the region.
  void guard_opened(const UserRegistrations& opened, const std::vector<std::any>& states);
  /// Returns the state that may own other regions, so that it is destroyed elsewhere.
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
  std::unique_ptr<Devices> devices_;  // null if no device is in use
  std::unique_ptr<UserState> user_state_;
};

}  // namespace remat
