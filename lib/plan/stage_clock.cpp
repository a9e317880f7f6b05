#include "lib/plan/stage_clock.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

namespace remat {

StageClock::StageClock(c10::Device device) : device_(device) {
  if (device.is_cpu()) return;
  try {
    has_times_ = true;
    seconds_between(recorded(), recorded());
  } catch (const c10::Error&) {
    has_times_ = false;
  }
}

StageClock::Moment StageClock::recorded() const {
  const auto flag = has_times_ ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT;
  auto event = std::make_shared<c10::Event>(device_.type(), flag);
  event->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  return {.event = std::move(event)};
}

StageClock::Moment StageClock::now() const {
  if (has_times_) return recorded();
  if (!device_.is_cpu()) recorded().event->synchronize();
  return {.host = std::chrono::steady_clock::now()};
}

double StageClock::seconds_between(const Moment& earlier, const Moment& later) const {
  if (!has_times_) return std::chrono::duration<double>(later.host - earlier.host).count();
  later.event->synchronize();
  return earlier.event->elapsedTime(*later.event) / 1e3;
}

}  // namespace remat
