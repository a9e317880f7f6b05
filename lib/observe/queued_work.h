#pragma once
// The time of work on a device, from events on its stream at both ends.
//
// Note [Device times]
// The host queues work and continues, so its clock does not show the device's time. Two events with
// times go into the stream around the work, which costs the stream almost nothing and the host no
// wait. The time between them is read later, when the device has passed the second event.
//
// A stream without work passes an event at once. So the time of work that is queued more slowly
// than it runs includes the gaps.
//
// One more event aligns the clocks of host and device. It is recorded while the stream is empty, or
// taken to be empty, and the host's time is noted with it.

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

namespace remat {

class QueuedWork {
 public:
  /// Begins the timing of work that is queued on `stream`. Null if the work cannot be timed: the
  /// backend has no events with times, or the work becomes part of a graph.
  static std::shared_ptr<QueuedWork> begin(const c10::Stream& stream);

  explicit QueuedWork(const c10::Stream& stream);
  /// Ends the timing, when all work is queued. Call on the thread that began it.
  void end();

  const c10::Stream& stream() const { return stream_; }
  /// Returns whether the work is done. Any thread, after `end`.
  bool is_done() const;
  void wait() const;
  /// [ns] by the clock of the device.
  struct Times {
    int64_t begin_ns, end_ns;
  };
  std::optional<Times> times(const class DeviceClock& clock) const;

 private:
  const c10::Stream stream_;
  mutable std::mutex mutex_;  // an event must not be used by several threads at once
  c10::Event begin_, end_;
};

/// The host's time of one moment of a device.
class DeviceClock {
 public:
  /// Notes the present time of the device of `stream`. `waits`: waits until the device is there.
  static std::shared_ptr<DeviceClock> set(const c10::Stream& stream, bool waits);

  explicit DeviceClock(c10::DeviceType type);
  /// Returns the noted time [ns] by the steady clock.
  int64_t set_at_ns() const { return set_at_ns_; }
  /// Returns the time [ns] by the steady clock of an event that the device has passed.
  int64_t time_of(const c10::Event& event) const;

 private:
  mutable std::mutex mutex_;
  c10::Event event_;
  int64_t set_at_ns_ = 0;
};

}  // namespace remat
