#pragma once
// Seeing what happens: process-wide counts, and recorders of what regions do, cost and hold.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "remat/export.h"

namespace remat {

/// Exact counts since the process started, except the two that say "now".
struct Counters {
  int64_t frames_created = 0;          ///< runs of `checkpoint()` with grad mode on
  int64_t frames_alive = 0;            ///< now: frames that some graph refers to
  int64_t recomputes = 0;              ///< begun, also those that failed
  int64_t early_stops = 0;             ///< recomputes that early stop ended
  int64_t tensors_dropped = 0;         ///< saved tensors that became slots
  int64_t tensors_recomputed = 0;      ///< slots filled by recomputes
  int64_t recomputed_bytes_alive = 0;  ///< now: [bytes] of recomputed tensors not yet handed over
};

/// Always on, any thread; each member is exact, taken one after the other.
REMAT_API Counters counters();

/// The outcome of calls of one operator in regions with a policy: a report for each outcome and
/// reason.
struct DecisionReport {
  std::string op;       ///< "aten::mm.default"
  std::string outcome;  ///< "kept", "moved" (kept elsewhere) or "recomputed"
  std::string reason;   ///< what the policy answered, or why that could not be
  int64_t calls = 0;    ///< in all first runs
  int64_t bytes = 0;    ///< [bytes] that these calls keep; results that nobody reads have none
};

/// Sums over all regions of one name that began while the recorder was alive.
struct RegionReport {
  std::string name;   ///< `CheckpointOptions::name`, or its default; empty: regions without one
  int64_t calls = 0;  ///< first runs that returned
  int64_t recomputes = 0;     ///< begun, also those that failed
  int64_t early_stops = 0;    ///< recomputes that were cut short
  int64_t bytes_dropped = 0;  ///< [bytes] that autograd would have kept; a storage once a call
  int64_t bytes_inputs = 0;   ///< [bytes] of inputs that stayed; none inside another region
  int64_t bytes_saved = 0;    ///< [bytes] that a policy kept
  int64_t bytes_recompute_peak = 0;    ///< [bytes] the most that one recompute computed again
  int64_t offloaded = 0;               ///< results that a policy moved to the CPU
  int64_t offload_fallbacks = 0;       ///< results that `PreferCpuOffload` could not move
  int64_t bytes_offloaded = 0;         ///< [bytes] of results that a policy moved to the CPU
  int64_t bytes_inputs_offloaded = 0;  ///< [bytes] of inputs that `offload_inputs` moved
  int64_t offload_loads = 0;           ///< how often a recompute brought a moved result back
  /// Number of them whose copies were begun before the recompute asked for them.
  int64_t offload_loads_ahead = 0;
  int64_t bytes_loaded = 0;  ///< [bytes] of all that recomputes brought back
  /// [seconds] that threads of the program spent on moving results: queueing copies, copying or
  /// waiting.
  double offload_wait_s = 0;
  double forward_s = 0;    ///< [seconds] of first runs, regions inside included
  double recompute_s = 0;  ///< [seconds] of recomputes, those inside included
  /// [seconds] from begin to end on the streams that first runs were queued on, regions inside
  /// included, summed over devices; 0 without an accelerator.
  double device_forward_s = 0;
  /// [seconds] of recomputes on the device, from the moment at which their inputs were there.
  double device_recompute_s = 0;
  std::vector<DecisionReport> decisions{};  ///< of its policy, in the order of their first call
};

/// The record of one device of an accelerator.
struct DeviceReport {
  c10::Device device = c10::kCPU;  ///< which one
  bool is_exact = true;     ///< bytes are those asked for; if not, as the allocator rounds them
  int64_t peak_bytes = 0;   ///< [bytes] the most that were alive at once
  int64_t bytes_out = 0;    ///< [bytes] copied to the host beside the work: offload
  int64_t bytes_in = 0;     ///< [bytes] copied back
  double copies_out_s = 0;  ///< [seconds] on the device of the copies out
  double copies_in_s = 0;   ///< [seconds] on the device of the copies back
  /// [seconds] that streams of the program stood still since a copy back was not there.
  double waited_s = 0;
};

/// The record of the files of offload and tiers.
struct FileReport {
  int64_t bytes_written = 0;  ///< [bytes] moved to files
  int64_t bytes_read = 0;     ///< [bytes] brought back
  double write_s = 0;         ///< [seconds] of writing, on any thread
  double read_s = 0;          ///< [seconds] of reading, on any thread
  int64_t waits = 0;          ///< how often a thread of the program's read, wrote or waited itself
  double waited_s = 0;        ///< [seconds] of that: what was not done beside the program
};

/// Transfers by the items of plans (`remat::run`) that share a name: stages, or regions with their
/// name.
struct MoveReport {
  std::string name;          ///< "stage 2", "stages 3 to 5", after the name in the options of `run`
  int64_t moves = 0;         ///< copies to where it waits
  int64_t bytes_moved = 0;   ///< [bytes] of these
  int64_t loads = 0;         ///< copies back that backward asked for
  int64_t loads_ahead = 0;   ///< of these, those that were begun before that
  int64_t bytes_loaded = 0;  ///< [bytes] of `loads`
  /// [seconds] that threads of the program spent on both: queueing copies, copying or waiting.
  double wait_s = 0;
};

/// Results of one operator that byte budgets (budget.h) dropped, and its calls that ran again.
struct EvictionReport {
  std::string op;             ///< "aten::mm.default"
  int64_t evictions = 0;      ///< results dropped
  int64_t bytes_evicted = 0;  ///< [bytes] of these
  int64_t reruns = 0;         ///< calls that ran again
  int64_t bytes_rerun = 0;    ///< [bytes] of the results made again
  double rerun_s = 0;         ///< [seconds] of these calls
  int64_t moves = 0;          ///< results moved away instead of dropped
  int64_t bytes_moved = 0;    ///< [bytes] of these
};

/// The bytes alive when an allocation did not fit: on an accelerator, or under a
/// `MemoryLimitGuard`.
struct FailedAllocation {
  /// The bytes that regions of one name held on the device.
  struct Held {
    std::string region;            ///< the name; empty: of regions without one
    int64_t regions = 0;           ///< how many
    int64_t inputs_bytes = 0;      ///< [bytes] of inputs that stayed; a storage once
    int64_t saved_bytes = 0;       ///< [bytes] that a policy kept
    int64_t recomputed_bytes = 0;  ///< [bytes] recomputed and not yet handed over
  };
  c10::Device device = c10::kCPU;  ///< where it did not fit
  int64_t asked_bytes = -1;        ///< [bytes] asked for; -1: the device's allocator does not tell
  int64_t live_bytes = 0;          ///< [bytes] of all tensors there
  int64_t parameters_bytes = 0;    ///< [bytes] of parameters that regions use
  std::vector<Held> held{};        ///< what held most first
};

/// The counts of a `Recorder`, by region name.
struct REMAT_API Report {
  std::vector<RegionReport> regions;    ///< in the order of their first call
  int64_t dropped_events = 0;           ///< that `max_events` left no room for; sums count them
  std::vector<DeviceReport> devices{};  ///< accelerators' devices that were in use
  /// The first allocations that failed, 16 at most.
  std::vector<FailedAllocation> failed_allocations{};
  FileReport files{};  ///< all 0 where nothing went to a file
  /// Reports of plans that moved something while the recorder was alive, in the order of their
  /// first move.
  std::vector<MoveReport> moves{};
  /// Drops and reruns under budgets, by operator. The operator that took the most seconds to run
  /// again is first.
  std::vector<EvictionReport> evictions{};
  /// A table for people, and what was alive at failed allocations.
  std::string to_string() const;
  std::string to_json() const;  ///< the same numbers as one JSON object
};

/// Options of a `Recorder`: the events that it records.
struct RecorderOptions {
  /// Sample the live bytes: of CPU tensors at every event and every allocation, of an accelerator's
  /// devices in use at every event and after every operator, with the peak since the sample before.
  bool memory = true;
  /// Also record the operators that run, on every thread. Costs 1 to 3 us each.
  bool operators = false;
  /// The oldest events go first, and the report says so. Sums stay exact.
  int64_t max_events = 1 << 20;
  /// Time regions and the copies of offload on an accelerator by events on the streams that run
  /// them.
  bool device_time = true;
};

/// Records, while alive or until `stop`, what regions do on every thread of the process. Several
/// may be alive. Under a BudgetGuard it also records each dropped result and each operator call
/// that runs again. Without a recorder, each place that could record costs one test of a flag. All
/// functions may be called meanwhile, on any thread. Devices: nothing waits for one while regions
/// run. What the work on its streams took is looked up by `report()` and by what draws or writes,
/// which wait until what was recorded by then is done. Each timed run takes two events of the
/// device. A Recorder that is made while devices are in use waits for them once, to set its clock
/// by theirs. Work that is captured as a graph is not timed.
/// Memory: about 100 bytes an event, `max_events` at most.
/// Threads: events of all threads, in the order in which they came in. Throws: `c10::ValueError`
/// for `max_events` below 1; `c10::Error` for a file that cannot be written.
class REMAT_API Recorder {
 public:
  explicit Recorder(RecorderOptions options = {});  ///< records from now on
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  /// Records no more; what was recorded stays. Once more does nothing. Not beside itself on another
  /// thread.
  void stop();

  Report report() const;  ///< the sums so far; waits for the device work that they count
  /// One line an event, without times: what happened in which order. Regions are numbered from 1 in
  /// the order in which they were first seen.
  std::string event_log() const;
  /// For Perfetto and chrome://tracing: regions, recomputes and operators as slices of their
  /// threads, what ran on a device as slices of its streams, live bytes as a counter for each
  /// device. Under a budget also the calls that run again, the drops and the limit.
  void write_chrome_trace(const std::filesystem::path& path) const;
  /// Live bytes over time, stacked by kind, with the regions below; one such picture for each
  /// device. Budgets are drawn as a line, and the operators that run again as bars.
  void write_memory_svg(const std::filesystem::path& path) const;
  /// One page without scripts or other files: the pictures, values under the pointer, the tables.
  void write_html(const std::filesystem::path& path) const;
  std::string to_html() const;  ///< the same page

 private:
  std::shared_ptr<class Recording> recording_;
};

/// One tensor that a graph saved, or that a region would compute again for it.
struct SavedTensorInfo {
  std::string node{};                                ///< the node's name: "SinBackward0"
  std::string region{};                              ///< of what was dropped: the region's name
  std::vector<int64_t> sizes{};                      ///< of the tensor
  at::ScalarType dtype = at::ScalarType::Undefined;  ///< of the tensor
  int64_t bytes = 0;            ///< [bytes] of its storage, or of the tensor that was dropped
  bool shares_storage = false;  ///< with one before it in the list: do not add these bytes
  bool dropped = false;         ///< not there: a recompute will bring it
};

/// Returns the tensors that the graph below `root` saved, in the order in which backward would read
/// them; computes nothing and starts no recompute. A tensor that one node saved twice is listed
/// once. A node that cannot say what it saved is listed by name alone, and a tensor that the
/// program's own hooks packed has no sizes.
/// Threads: not beside a backward over the same graph. Throws nothing of its own.
REMAT_API std::vector<SavedTensorInfo> saved_tensors(const at::Tensor& root);

}  // namespace remat
