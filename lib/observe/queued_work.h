#pragma once
// What work takes on a device: events on its stream at both ends.
//
// Note [Device times]
// The host queues work and goes on, so its clock says nothing of the device. Two events with times
// go into the stream around the work, which costs the stream next to nothing and the host no wait;
// what lies between them is known once the device has passed the second, and looked up then. A
// stream without work is passed at once, so the time of work that is queued more slowly than it
// runs has the gaps in it. To lay the host's clock over the device's, one more event is recorded
// while the stream is empty or taken to be, and the host's time noted beside it.

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

namespace remat {

class QueuedWork {
 public:
  /// Work begins that is queued on `stream`. Null where it cannot be timed: the backend has no
  /// events with times, or what is queued becomes part of a graph.
  static std::shared_ptr<QueuedWork> begin(const c10::Stream& stream);

  explicit QueuedWork(const c10::Stream& stream);
  /// All of it is queued. On the thread that began it.
  void end();

  const c10::Stream& stream() const { return stream_; }
  /// Any thread, once it has ended.
  bool is_done() const;
  void wait() const;
  /// [ns] by the clock of its device; nothing if the backend does not tell. Only when it is done.
  struct Times {
    int64_t begin_ns, end_ns;
  };
  std::optional<Times> times(const class DeviceClock& clock) const;

 private:
  const c10::Stream stream_;
  mutable std::mutex mutex_;  // an event is not for several threads at once
  c10::Event begin_, end_;
};

/// The host's time of one moment of a device.
class DeviceClock {
 public:
  /// Of the device of `stream`, now. `waits`: until the device has come to it.
  static std::shared_ptr<DeviceClock> set(const c10::Stream& stream, bool waits);

  explicit DeviceClock(c10::DeviceType type);
  /// [ns] by the steady clock.
  int64_t set_at_ns() const { return set_at_ns_; }
  /// [ns] by the steady clock, of an event that the device has passed.
  int64_t time_of(const c10::Event& event) const;

 private:
  mutable std::mutex mutex_;
  c10::Event event_;
  int64_t set_at_ns_ = 0;
};

}  // namespace remat
