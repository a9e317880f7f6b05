#pragma once
// Time on one device: the host's clock for the CPU, events on the current stream for an
// accelerator.

#include <c10/core/Device.h>

#include <chrono>
#include <memory>

namespace c10 {
struct Event;
}

namespace remat {

class StageClock {
 public:
  /// A moment of the device, at which the work queued before it is done.
  struct Moment {
    std::chrono::steady_clock::time_point host{};
    std::shared_ptr<c10::Event> event{};  ///< null if `host` is the time
  };

  explicit StageClock(c10::Device device);
  /// Returns the present moment. Waits only if the device's events have no times.
  Moment now() const;
  /// Returns the seconds between two moments; waits until the later one has come.
  double seconds_between(const Moment& earlier, const Moment& later) const;

 private:
  Moment recorded() const;
  const c10::Device device_;
  bool has_times_ = false;
};

}  // namespace remat
