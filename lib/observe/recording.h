#pragma once
// The records of regions and budgets: one event for each moment, and sums by name.
//
// Note [Recording]
// Every place that can record asks `is_recording()` first, which reads one flag; the rest is out of
// line. A frame notes at its begin whether it is recorded. A frame that began before any recorder
// stays unrecorded, so that sums hold whole regions only. Events go to every recording that is
// alive.
//
// Note [Samples of a device]
// An accelerator's allocator reports each allocation, in rounded sizes, to the object that has
// replaced LibTorch's profiler on the thread. A recorder in that place would exclude the profiler,
// and would miss threads that did not get its state. So only a guard takes it, on request
// (remat/allocations.h).
//
// A recorder itself reads the allocator's statistics, at every event of a region and after every
// operator on any thread. They have the requested bytes, and the peak since the last sample. They
// also count allocations that did not fit. The operator that made such an allocation ends before
// regions release anything.

#include <c10/util/FunctionRef.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lib/observe/kept_bytes.h"
#include "lib/observe/queued_work.h"
#include "lib/rng/device_rng.h"
#include "lib/scope/region_info.h"
#include "lib/tensor/capture.h"
#include "remat/report.h"

namespace remat {

enum class EventKind : uint8_t {
  RegionBegins,
  RegionEnds,
  RegionThrows,
  RecomputeBegins,
  RecomputeEnds,
  RecomputeStops,
  RecomputeThrows,
  Pack,
  Fill,
  Read,
  Memory,
  Decision,
  Operator,
  FileWrite,
  FileRead,
  FileWait,
  Allocation,
  Eviction,
  Rerun,
  Budget,
  MoveAway,
  ReadBack
};

struct Event {
  EventKind kind;
  bool held_up = false;            ///< of work on a file: the program's own thread waited for it
  c10::Device device = c10::kCPU;  ///< of `bytes`
  int32_t depth = 0;
  int32_t thread = 0;    ///< from 1, in order of appearance
  int64_t region = 0;    ///< from 1, in order of appearance; 0: none
  int64_t number = 0;    ///< of a slot; or bytes, negative for freed ones; or a limit
  int64_t time_ns = -1;  ///< since the recording began; -1: to be set when it is added
  int64_t begin_ns = 0;  ///< begin of the span that ends here
  std::shared_ptr<const std::string>
      text{};  ///< a region's name, an operator's, a tensor's metadata
  LiveKinds bytes{};
};

/// Work of a region, or of a copy, on a stream of a device.
struct DeviceBar {
  enum class Kind : uint8_t { Forward, Recompute, CopyOut, CopyIn, CopyWait };
  Kind kind;
  c10::Stream stream;
  int64_t region = 0;                         ///< as an event's
  std::shared_ptr<const std::string> name{};  ///< of the region
  int64_t bytes = 0;                          ///< of a copy, or of one that is waited for
  int64_t begin_ns = 0, end_ns = 0;           ///< since the recording began
};

class Recording {
 public:
  explicit Recording(RecorderOptions options);

  const RecorderOptions& options() const { return options_; }
  /// Adds an event to the events and the sums, by default one of the present moment. `begin`: the
  /// begin of the span that it ends.
  void add(Event event, int64_t frame_id = -1, std::chrono::steady_clock::time_point begin = {});
  /// Adds work on a device that has ended, or will end.
  void add(std::shared_ptr<const QueuedWork> work, DeviceBar bar, int64_t frame_id);
  void add(FailedAllocation failed);
  /// Calls `change` with the sums of the moves of plans under a name.
  template <class Change>
  void sum_moves(const std::string& name, Change&& change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    change(report_of(moves_, &MoveReport::name, name));
  }
  /// Notes that a device is in use.
  void saw(c10::Device device, bool is_exact, int64_t peak_bytes);
  /// Sets the host's clock by those of the devices in use, if they are not set yet.
  void set_clocks(bool waits);
  /// Calls `change` with the sums of the region's name.
  template <class Change>
  void sum(const std::string& name, Change&& change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    change(of_name(name));
  }
  /// Waits for the work on devices that was added so far, as `bars` does.
  Report report();
  std::vector<Event> events() const;
  std::vector<DeviceBar> bars();
  /// LibTorch's handle of the callback for operators, if they are recorded.
  std::optional<uint64_t> operators{};
  /// LibTorch's handle of the callback that samples devices, if there is one.
  std::optional<uint64_t> samples{};

 private:
  static constexpr std::size_t max_failed = 16;
  struct Pending {
    std::shared_ptr<const QueuedWork> work;
    DeviceBar bar;
  };
  /// Returns the report with this key, a new one if there was none.
  template <class Each, class Key>
  static Each& report_of(std::vector<Each>& all, Key Each::* key, const Key& value) {
    for (Each& each : all)
      if (each.*key == value) return each;
    all.emplace_back().*key = value;
    return all.back();
  }
  RegionReport& of_name(const std::string& name);
  DeviceReport& of_device(c10::Device device);
  void sum(const Event& event, double seconds);
  int64_t number_of(int64_t frame_id);
  void finish(const Pending& pending);
  void collect(bool waits);

  const RecorderOptions options_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  mutable std::mutex mutex_;
  /// The latest events; `max_events` bounds their number.
  struct Latest {
    std::deque<Event> events;
    std::vector<Event> budgets_before;  ///< by device, the last change that left `events`
    int64_t dropped = 0;
  } latest_;
  std::vector<RegionReport> regions_;
  std::map<std::string, std::size_t> by_name_;
  std::unordered_map<int64_t, int64_t> region_numbers_;
  std::unordered_map<std::thread::id, int32_t> thread_numbers_;
  std::deque<Pending> pending_;
  std::deque<DeviceBar> bars_;
  std::vector<DeviceReport> devices_;
  std::vector<FailedAllocation> failed_;
  FileReport files_;
  std::vector<MoveReport> moves_;
  std::vector<EvictionReport> evictions_;
  std::unordered_map<c10::Device, std::shared_ptr<DeviceClock>> clocks_;  // null: cannot be set
};

namespace recording {

/// The bytes of CPU tensors alive have become `live`.
void memory_changes(int64_t live);
/// Notes that an allocation of `asked` bytes on the CPU did not fit beside the live bytes.
void allocation_fails(int64_t asked, int64_t live);

/// A result that a budget dropped.
struct Eviction {
  std::string_view op;    ///< lives for the whole process
  c10::Device device;     ///< of the result
  int64_t bytes = 0;      ///< [bytes] of the result
  int64_t live = 0;       ///< [bytes] alive without it on the device
  bool is_moved = false;  ///< a copy elsewhere has the content
};
/// Notes results that budgets dropped or moved. The caller holds no lock.
void budget_drops(const std::vector<Eviction>& evictions);
/// Notes an operator call that ran again for a budget, from `begin` until now. `bytes`: its results
/// that were made again, on `device`. The caller holds no lock.
void budget_reruns(std::string_view op, c10::Device device, int64_t bytes,
                   std::chrono::steady_clock::time_point begin);
/// Notes that a budget read a moved content back, on `device`. The caller holds no lock.
void budget_reads_back(c10::Device device, int64_t bytes);
inline constexpr int64_t no_budget = std::numeric_limits<int64_t>::max();
/// [bytes] The least limit of the device's live bytes among all budgets; `no_budget` without one.
std::atomic<int64_t>& budget_limit(c10::Device device);
/// Notes that this limit has changed. The caller holds no lock.
void budget_changes(c10::Device device);
/// Adds the present limits to the recording.
void add_budgets(Recording& recording);

}  // namespace recording

}  // namespace remat
