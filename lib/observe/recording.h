#pragma once
// The notes of recorders on regions and budgets: an event a moment, and sums by name.
//
// Note [Recording]
// Every place that can record asks `is_recording()` first, which reads one flag; the rest is out of
// line. A frame notes at its begin whether it is recorded; one that began before any recorder stays
// unrecorded, so that sums hold whole regions only. Events go to every recording that is alive.
//
// Note [Samples of a device]
// An accelerator's allocator tells each allocation to whoever took the place of LibTorch's profiler
// on the thread, in rounded sizes. A recorder would shut the profiler out, and be told nothing on
// threads that were not given its state: so that is a guard's work, for who wants it
// (remat/allocations.h). By itself a recorder asks the allocator's statistics, at every event of a
// region and after every operator on any thread: bytes as asked for, and what was alive at most in
// between. They also count the allocations that did not fit, and the operator that asked ends
// before anything that regions hold is let go.

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

struct Event;
/// How a run of a region went that ends with an event.
struct Span {
  bool is_recompute = false;
  std::string_view end;  ///< "returned", "stopped early", "threw"
};
/// Nothing for an event that ends none.
std::optional<Span> span_of(const Event& event);

struct Event {
  EventKind kind;
  c10::Device device = c10::kCPU;  ///< of `bytes`
  int32_t depth = 0;
  int32_t thread = 0;    ///< from 1, in order of appearance
  int64_t region = 0;    ///< from 1, in order of appearance; 0: none
  int64_t number = 0;    ///< of a slot; or [bytes], less than 0 for those freed; or a limit
  int64_t time_ns = 0;   ///< since the recording began
  int64_t begin_ns = 0;  ///< of what ends here
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
  void add(Event event, int64_t frame_id);
  /// Work on a device that has ended, or will.
  void add(std::shared_ptr<const QueuedWork> work, DeviceBar bar, int64_t frame_id);
  void add(FailedAllocation failed);
  /// `change` gets the sums of files.
  template <class Change>
  void sum_files(Change&& change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    change(files_);
  }
  /// `change` gets the sums of what plans moved under a name.
  template <class Change>
  void sum_moves(const std::string& name, Change&& change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (MoveReport& each : moves_)
      if (each.name == name) return change(each);
    change(moves_.emplace_back(MoveReport{.name = name}));
  }
  /// `change` gets the sums of an operator under budgets.
  template <class Change>
  void sum_evictions(std::string_view op, Change&& change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (EvictionReport& each : evictions_)
      if (each.op == op) return change(each);
    change(evictions_.emplace_back(EvictionReport{.op = std::string(op)}));
  }
  /// A device is in use.
  void saw(c10::Device device, bool is_exact, int64_t peak_bytes);
  /// Sets the host's clock by those of the devices in use, if they are not set yet.
  void set_clocks(bool waits);
  /// `change` gets the sums of the region's name.
  template <class Change>
  void sum(const std::string& name, Change&& change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    change(of_name(name));
  }
  /// Waits for the work on devices that was added so far, as `bars` does.
  Report report();
  std::vector<Event> events() const;
  std::vector<DeviceBar> bars();
  /// [ns] from the recording's begin.
  int64_t time_of(std::chrono::steady_clock::time_point time) const;
  /// LibTorch's handle of the callback for operators, if they are recorded.
  std::optional<uint64_t> operators{};
  /// The same of the one that samples devices.
  std::optional<uint64_t> samples{};

 private:
  static constexpr std::size_t max_failed = 16;
  struct Pending {
    std::shared_ptr<const QueuedWork> work;
    DeviceBar bar;
  };
  RegionReport& of_name(const std::string& name);
  DeviceReport& of_device(c10::Device device);
  int64_t number_of(int64_t frame_id);
  void finish(const Pending& pending);
  void collect(bool waits);

  const RecorderOptions options_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  mutable std::mutex mutex_;
  std::deque<Event> events_;
  std::vector<Event> budgets_before_;  // by device, the last change that left `events_`
  int64_t dropped_ = 0;
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
/// An allocation of `asked` bytes on the CPU did not fit beside those alive.
void allocation_fails(int64_t asked, int64_t live);

/// A result that a budget dropped.
struct Eviction {
  std::string_view op;    ///< lives for good
  c10::Device device;     ///< of the result
  int64_t bytes = 0;      ///< [bytes] of the result
  int64_t live = 0;       ///< [bytes] alive without it on the device
  bool is_moved = false;  ///< a copy elsewhere has the content
};
/// Budgets dropped or moved these results. The caller holds no lock.
void budget_drops(const std::vector<Eviction>& evictions);
/// A call of an operator ran again for a budget, from `begin` until now. `bytes`: of its results
/// that were made again, on `device`. The caller holds no lock.
void budget_reruns(std::string_view op, c10::Device device, int64_t bytes,
                   std::chrono::steady_clock::time_point begin);
/// A budget read a moved content back, on `device`. The caller holds no lock.
void budget_reads_back(c10::Device device, int64_t bytes);
inline constexpr int64_t no_budget = std::numeric_limits<int64_t>::max();
/// [bytes] The least limit of the device's live bytes among all budgets; `no_budget` without one.
std::atomic<int64_t>& budget_limit(c10::Device device);
/// That limit has changed. The caller holds no lock.
void budget_changes(c10::Device device);
/// Gives the recording the limits that there are.
void add_budgets(Recording& recording);

}  // namespace recording

}  // namespace remat
