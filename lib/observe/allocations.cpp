// RecordAllocationsGuard: reports of allocators become events of recordings.

#include "remat/allocations.h"

#include <memory>
#include <string>
#include <utility>

#include "lib/base/error.h"
#include "lib/observe/device_samples.h"
#include "lib/observe/recordings.h"
#include "lib/scope/region_scope.h"
#include "lib/seam/allocation_reports.h"

namespace remat {

namespace {

// The allocator may hold its lock here, while other threads ask it for its statistics. This
// function therefore takes only the locks of recordings, under which no thread asks an allocator.
void tell_allocation(const seam::AllocationReport& report) noexcept try {
  if (report.device.is_cpu() || !is_recording() || Writing::is_here()) return;
  const Writing writing;
  if (report.kind == seam::AllocationReport::Kind::Refused)
    return note_refused(report.device, report.bytes);
  const detail::RegionScope* const scope = detail::innermost_region();
  const RegionInfo* const region =
      scope != nullptr && scope->is_own_thread() ? &scope->region() : nullptr;
  Event event{
      .kind = EventKind::Allocation,
      .device = report.device,
      .number = report.kind == seam::AllocationReport::Kind::Freed ? -report.bytes : report.bytes,
      .bytes = KeptBytes::all().now(report.device, report.live_bytes)};
  if (region != nullptr) {
    event.depth = region->depth;
    event.text = std::make_shared<const std::string>(region->name());
  }
  recordings().visit([&](Recording& recording) {
    if (recording.options().memory) recording.add(event, region == nullptr ? -1 : region->id);
  });
} catch (...) {  // no room for an event must not end an allocation
}

}  // namespace

struct RecordAllocationsGuard::Reports {
  seam::AllocationReports reports{&tell_allocation};
};

RecordAllocationsGuard::RecordAllocationsGuard() {
  if (seam::AllocationReports::are_taken())
    throw_unsupported(
        "the allocations of this thread cannot be recorded",
        "LibTorch's profiler runs on this thread, and allocators report to the profiler instead",
        "read the allocations from the profiler (profile_memory), or start the profiler on "
        "another thread");
  reports_ = std::make_unique<Reports>();
}

RecordAllocationsGuard::~RecordAllocationsGuard() = default;

}  // namespace remat
