#pragma once
// Reports each allocation of LibTorch's device allocators to a listener of the thread.

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

namespace remat::seam {

struct AllocationReport {
  enum class Kind : uint8_t { Allocated, Freed, Refused };
  Kind kind;
  c10::Device device;
  int64_t bytes = 0;       ///< as the allocator rounds them; if refused, as requested
  int64_t live_bytes = 0;  ///< of the device, rounded, including this one
};

/// Called inside the allocator, which may hold its lock: must not allocate on a device or query
/// one. Throws nothing.
using AllocationListener = void (*)(const AllocationReport& report) noexcept;

// Note [Listening to allocators]
// An allocator reports to the object that LibTorch's profiler puts into its place of the thread's
// debug information. LibTorch carries that information to the threads of a backward that is called
// there. An object of ours in that place receives the reports instead. But the profiler's functions
// treat any object there as their own: a running profiler would write into ours with each operator.
// So a listener refuses a thread whose profiler runs.
//
// A profiler started later finds the place taken and fails ("Profiler is already enabled on this
// thread."). A second attempt removes our object before it fails, which ends the reports. Our
// object derives from the profiler's state and says that it profiles nothing, so asking whether a
// profiler runs is safe, and the answer is no.

/// Reports allocations of this thread to `listener` while alive, and those of threads that LibTorch
/// gives this thread's state. The destructor ends the effect of this object only, on any thread; on
/// another thread the place stays taken until the next object is made on the first.
class AllocationReports {
 public:
  explicit AllocationReports(AllocationListener listener);
  ~AllocationReports();
  AllocationReports& operator=(AllocationReports&&) = delete;

  /// Returns whether another object than ours has the place on this thread.
  static bool are_taken();

 private:
  class Place;
  std::shared_ptr<Place> place_;
};

}  // namespace remat::seam
