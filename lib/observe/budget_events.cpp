// The events of budgets for recorders: results dropped, moved or read back, calls that run again,
// and the limit.

#include <array>
#include <memory>
#include <string>
#include <utility>

#include "lib/observe/memory_source.h"
#include "lib/observe/recording.h"
#include "lib/observe/recordings.h"
#include "lib/seam/accelerator.h"

namespace remat::recording {

namespace {

// The CPU, and the devices of the present accelerator.
using Limits = std::array<std::atomic<int64_t>, 65>;
Limits& limits() {
  static Limits* const all = [] {
    auto* const made = new Limits;  // leaked: budgets may end in static destructors
    for (std::atomic<int64_t>& each : *made) each.store(no_budget);
    return made;
  }();
  return *all;
}

Event event_of_budget(c10::Device device) {
  return {.kind = EventKind::Budget,
          .device = device,
          .number = budget_limit(device).load(std::memory_order_relaxed)};
}

int64_t live_on(c10::Device device) {
  return (device.is_cpu() ? cpu_memory() : device_memory(device)).live_bytes();
}

}  // namespace

std::atomic<int64_t>& budget_limit(c10::Device device) {
  return limits()[device.is_cpu() ? 0 : static_cast<std::size_t>(device.index()) + 1];
}

void budget_drops(const std::vector<Eviction>& evictions) {
  const Writing writing;
  recordings().visit([&](Recording& recording) {
    for (const Eviction& each : evictions)
      recording.add({.kind = each.is_moved ? EventKind::MoveAway : EventKind::Eviction,
                     .device = each.device,
                     .number = each.bytes,
                     .text = std::make_shared<const std::string>(each.op),
                     .bytes = {.live = each.live}});
  });
}

void budget_reads_back(c10::Device device, int64_t bytes) {
  const Writing writing;
  const Event event{.kind = EventKind::ReadBack,
                    .device = device,
                    .number = bytes,
                    .bytes = {.live = live_on(device)}};
  recordings().visit([&](Recording& recording) { recording.add(event); });
}

void budget_reruns(std::string_view op, c10::Device device, int64_t bytes,
                   std::chrono::steady_clock::time_point begin) {
  const Writing writing;
  const Event event{.kind = EventKind::Rerun,
                    .device = device,
                    .number = bytes,
                    .text = std::make_shared<const std::string>(op),
                    .bytes = {.live = live_on(device)}};
  recordings().visit([&](Recording& recording) { recording.add(event, -1, begin); });
}

void add_budgets(Recording& recording) {
  const c10::DeviceType far = present_accelerator().value_or(c10::kCPU);
  for (std::size_t i = 0; i < limits().size(); ++i) {
    if (limits()[i].load(std::memory_order_relaxed) == no_budget) continue;
    const c10::Device device =
        i == 0 ? c10::Device(c10::kCPU) : c10::Device(far, static_cast<c10::DeviceIndex>(i - 1));
    recording.add(event_of_budget(device));
  }
}

void budget_changes(c10::Device device) {
  if (!is_recording()) return;
  const Writing writing;
  recordings().visit([&](Recording& recording) { recording.add(event_of_budget(device)); });
}

}  // namespace remat::recording
