#pragma once
// Every allocation on an accelerator, for the recorders that are alive.

#include <memory>

#include "remat/export.h"

namespace remat {

/// While alive, passes each allocation and each release on an accelerator to every `Recorder` that
/// is alive and records memory. Sizes are those that the allocator reports, after its rounding.
/// Each event names the region that the thread runs, and the live bytes by kind. The events appear
/// in `Recorder::event_log` and in the trace; each device's picture shows the allocator's bytes as
/// a line. (Without this guard, a recorder samples statistics after each operator, in bytes as
/// asked for.) A failed allocation reports its size (`FailedAllocation::asked_bytes`).
///
///     remat::Recorder recorder;
///     {
///       const remat::RecordAllocationsGuard allocations;
///       model->forward(batch).sum().backward();
///     }
///
/// Threads: records the thread that made the guard, and the threads on which a backward called
/// there runs. Allocations and releases of other threads are included in the sum of the next
/// report. A guard that is destroyed out of order, or on another thread, ends only its own effect.
/// For its lifetime the guard takes the place of LibTorch's profiler on its thread: a profiler that
/// is started meanwhile reports that one is enabled already.
/// Costs 100 bytes and about a microsecond per event, and without a recorder one function call.
/// Throws `CheckpointError` (`Unsupported`) if LibTorch's profiler runs on this thread.
class REMAT_API RecordAllocationsGuard {
 public:
  RecordAllocationsGuard();
  ~RecordAllocationsGuard();
  RecordAllocationsGuard(const RecordAllocationsGuard&) = delete;
  RecordAllocationsGuard(RecordAllocationsGuard&&) = delete;
  RecordAllocationsGuard& operator=(const RecordAllocationsGuard&) = delete;
  RecordAllocationsGuard& operator=(RecordAllocationsGuard&&) = delete;

 private:
  struct Reports;
  std::unique_ptr<Reports> reports_;
};

}  // namespace remat
