#include "lib/observe/queued_work.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <cmath>

#include "lib/seam/accelerator.h"

namespace remat {

namespace {

constexpr auto with_times = c10::EventFlag::BACKEND_DEFAULT;

/// False once a backend has refused an event or a time; it is not asked again.
std::atomic<bool> has_times{true};

template <class Use>
auto unless_refused(Use&& use) -> decltype(use()) {
  if (!has_times) return {};
  try {
    return use();
  } catch (const c10::Error&) {
    has_times = false;
    return {};
  }
}

int64_t steady_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

QueuedWork::QueuedWork(const c10::Stream& stream)
    : stream_(stream),
      begin_(stream.device_type(), with_times),
      end_(stream.device_type(), with_times) {
  begin_.record(stream_);
}

std::shared_ptr<QueuedWork> QueuedWork::begin(const c10::Stream& stream) {
  return unless_refused([&]() -> std::shared_ptr<QueuedWork> {
    if (is_capturing(stream)) return nullptr;
    return std::make_shared<QueuedWork>(stream);
  });
}

void QueuedWork::end() { end_.record(stream_); }

bool QueuedWork::is_done() const {
  const std::lock_guard lock(mutex_);
  return end_.query();
}

void QueuedWork::wait() const {
  const std::lock_guard lock(mutex_);
  end_.synchronize();
}

std::optional<QueuedWork::Times> QueuedWork::times(const DeviceClock& clock) const {
  const std::lock_guard lock(mutex_);
  return unless_refused([&]() -> std::optional<Times> {
    const int64_t begin = clock.time_of(begin_);
    return Times{begin, begin + std::llround(begin_.elapsedTime(end_) * 1e6)};
  });
}

DeviceClock::DeviceClock(c10::DeviceType type) : event_(type, with_times) {}

std::shared_ptr<DeviceClock> DeviceClock::set(const c10::Stream& stream, bool waits) {
  return unless_refused([&]() -> std::shared_ptr<DeviceClock> {
    if (is_capturing(stream)) return nullptr;
    auto clock = std::make_shared<DeviceClock>(stream.device_type());
    clock->event_.record(stream);
    if (waits) clock->event_.synchronize();
    clock->set_at_ns_ = steady_ns();
    return clock;
  });
}

int64_t DeviceClock::time_of(const c10::Event& event) const {
  const std::lock_guard lock(mutex_);
  return set_at_ns_ + std::llround(event_.elapsedTime(event) * 1e6);
}

}  // namespace remat
