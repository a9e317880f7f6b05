#pragma once
// Every allocation on an accelerator, for the recorders that are alive.

#include <memory>

#include "remat/export.h"

namespace remat {

/// While alive, every `Recorder` that is alive and records memory gets each allocation and each
/// release on an accelerator, as its allocator tells them: in the sizes that it rounds them to,
/// with the region that the thread runs and, by kind, what is alive then. They stand in
/// `Recorder::event_log`, in the trace, and in each device's picture as a line: what the allocator
/// has given out. (A recorder alone samples statistics after each operator, in bytes as asked for.)
/// An allocation that did not fit tells how much was asked for (`FailedAllocation::asked_bytes`).
///
///     remat::Recorder recorder;
///     {
///       const remat::RecordAllocationsGuard allocations;
///       model->forward(batch).sum().backward();
///     }
///
/// Threads: those of the thread that made the guard, and of the threads on which a backward called
/// there runs. What another thread allocates or frees is in the sum of the next report. Destroyed
/// out of order, or on another thread, it ends its own effect only. It takes the place of
/// LibTorch's profiler on its thread, from its begin to its end there: one that is started
/// meanwhile says that it is already enabled.
/// Costs an event an allocation, of 100 bytes and about a microsecond, and nothing without a
/// recorder but a call.
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
