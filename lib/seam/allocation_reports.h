#pragma once
// What LibTorch's allocators tell of each allocation, to the one who listens on a thread.

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

namespace remat::seam {

struct AllocationReport {
  enum class Kind : uint8_t { Allocated, Freed, Refused };
  Kind kind;
  c10::Device device;
  int64_t bytes = 0;       ///< as the allocator rounds them; of what was refused, as asked for
  int64_t live_bytes = 0;  ///< of the device, the same way, with this one
};

/// Called inside the allocator, which may hold its lock: allocates nothing on a device and asks
/// none. Throws nothing.
using AllocationListener = void (*)(const AllocationReport& report) noexcept;

// Note [Listening to allocators]
// An allocator tells the object that LibTorch's profiler puts into its place of the thread's debug
// information, which LibTorch carries to the threads of a backward that is called there. An object
// of ours in that place is told instead. But the profiler's functions take whatever stands there
// for their own: one that runs already would write into ours with each operator. So a listener
// refuses a thread whose profiler runs. One that would be started later finds the place taken and
// says so ("Profiler is already enabled on this thread."; once more, and it takes ours away before
// it fails, so that nothing is told any more). Ours is a profiler's state by its base, which says
// that it profiles nothing, so that asking whether a profiler runs is safe, and answered with no.

/// While alive, `listener` is told of the allocations of this thread, and of those threads that
/// LibTorch gives this one's state. Ends its own effect only, wherever it is destroyed; on another
/// thread the place stays taken until one is made here again.
class AllocationReports {
 public:
  explicit AllocationReports(AllocationListener listener);
  ~AllocationReports();
  AllocationReports& operator=(AllocationReports&&) = delete;

  /// Whether the place is taken on this thread by somebody else.
  static bool are_taken();

 private:
  class Place;
  std::shared_ptr<Place> place_;
};

}  // namespace remat::seam
