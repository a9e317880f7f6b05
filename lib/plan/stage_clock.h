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
  /// A moment of the device: what was queued before it is done then.
  struct Moment {
    std::chrono::steady_clock::time_point host{};
    std::shared_ptr<c10::Event> event{};  ///< null where the host's time says it
  };

  explicit StageClock(c10::Device device);
  /// Waits for nothing, unless the device's events have no times.
  Moment now() const;
  /// [seconds]; waits until the later one has come.
  double seconds_between(const Moment& earlier, const Moment& later) const;

 private:
  Moment recorded() const;
  const c10::Device device_;
  bool has_times_ = false;
};

}  // namespace remat
