#pragma once
// Reports: recorders of the activity, cost and memory of regions.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "remat/counters.h"
#include "remat/export.h"

namespace remat {

/// Calls of one operator in regions with a policy; each outcome and reason has its own report.
struct DecisionReport {
  std::string op;       ///< "aten::mm.default"
  std::string outcome;  ///< "kept", "moved" (kept elsewhere) or "recomputed"
  std::string reason;   ///< the policy's answer, or why it could not be followed
  int64_t calls = 0;    ///< calls in all first runs
  int64_t bytes = 0;    ///< [bytes] that these calls keep; unread results do not count
};

/// Sums over all regions with one name that began while the recorder was alive.
struct RegionReport {
  std::string name;   ///< `CheckpointOptions::name`, or its default; empty: regions without one
  int64_t calls = 0;  ///< first runs that returned
  int64_t recomputes = 0;     ///< begun, also those that failed
  int64_t early_stops = 0;    ///< recomputes that were cut short
  int64_t bytes_dropped = 0;  ///< [bytes] that autograd would have saved; a storage once per call
  int64_t bytes_inputs = 0;   ///< [bytes] of inputs that stayed; 0 inside another region
  int64_t bytes_saved = 0;    ///< [bytes] that a policy kept
  int64_t bytes_recompute_peak = 0;    ///< [bytes] largest total that one recompute computed
  int64_t offloaded = 0;               ///< results that a policy moved to the CPU
  int64_t offload_fallbacks = 0;       ///< results that `PreferCpuOffload` could not move
  int64_t bytes_offloaded = 0;         ///< [bytes] of results that a policy moved to the CPU
  int64_t bytes_inputs_offloaded = 0;  ///< [bytes] of inputs that `offload_inputs` moved
  int64_t offload_loads = 0;           ///< moved results that recomputes loaded back
  /// Number of `offload_loads` whose copies began before the recompute read the result.
  int64_t offload_loads_ahead = 0;
  int64_t bytes_loaded = 0;  ///< [bytes] of `offload_loads`
  /// [seconds] that threads of the program spent on moving results: queueing copies, copying or
  /// waiting.
  double offload_wait_s = 0;
  double forward_s = 0;    ///< [seconds] of first runs, regions inside included
  double recompute_s = 0;  ///< [seconds] of recomputes, inner ones included
  /// [seconds] of first runs on the device: from begin to end on the streams where they were
  /// queued, regions inside included, summed over devices; 0 without an accelerator.
  double device_forward_s = 0;
  /// [seconds] of recomputes on the device, from the moment at which their inputs were ready.
  double device_recompute_s = 0;
  /// Decisions of its policy, in the order of first calls.
  std::vector<DecisionReport> decisions{};
};

/// The record of one device of an accelerator.
struct DeviceReport {
  c10::Device device = c10::kCPU;  ///< the device
  bool is_exact = true;     ///< whether bytes are as asked for; if not, as rounded by the allocator
  int64_t peak_bytes = 0;   ///< [bytes] largest total alive at once
  int64_t bytes_out = 0;    ///< [bytes] copied to the host beside other work: offload
  int64_t bytes_in = 0;     ///< [bytes] copied back to the device
  double copies_out_s = 0;  ///< [seconds] on the device of the copies out
  double copies_in_s = 0;   ///< [seconds] on the device of the copies back
  /// [seconds] that streams of the program waited for copies back.
  double waited_s = 0;
};

/// The record of the files of offload and tiers.
struct FileReport {
  int64_t bytes_written = 0;  ///< [bytes] moved to files
  int64_t bytes_read = 0;     ///< [bytes] read back
  double write_s = 0;         ///< [seconds] of writing, on any thread
  double read_s = 0;          ///< [seconds] of reading, on any thread
  int64_t waits = 0;          ///< reads, writes and waits by threads of the program
  double waited_s = 0;        ///< [seconds] of `waits`: work that did not run beside the program
};

/// Transfers by plan items (`remat::run`) that share a name: stages, or regions with their name.
struct MoveReport {
  std::string name;          ///< "stage 2", "stages 3 to 5", after the name in the options of `run`
  int64_t moves = 0;         ///< copies to the place of moved tensors
  int64_t bytes_moved = 0;   ///< [bytes] of these
  int64_t loads = 0;         ///< copies back that backward read
  int64_t loads_ahead = 0;   ///< number of `loads` that began before the read
  int64_t bytes_loaded = 0;  ///< [bytes] of `loads`
  /// [seconds] that threads of the program spent on copies in both directions: queueing, copying or
  /// waiting.
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
  /// The bytes that regions with one name held on the device.
  struct Held {
    std::string region;            ///< the name; empty for regions without one
    int64_t regions = 0;           ///< number of regions
    int64_t inputs_bytes = 0;      ///< [bytes] of inputs that stayed; a storage counts once
    int64_t saved_bytes = 0;       ///< [bytes] that a policy kept
    int64_t recomputed_bytes = 0;  ///< [bytes] recomputed and not yet handed over
  };
  c10::Device device = c10::kCPU;  ///< device of the allocation
  int64_t asked_bytes = -1;        ///< [bytes] asked for; -1: not reported by the allocator
  int64_t live_bytes = 0;          ///< [bytes] of all tensors there
  int64_t parameters_bytes = 0;    ///< [bytes] of parameters that regions use
  std::vector<Held> held{};        ///< largest first
};

/// The counts of a `Recorder`, by region name.
struct REMAT_API Report {
  std::vector<RegionReport> regions;    ///< in the order of their first call
  int64_t dropped_events = 0;           ///< events beyond `max_events`; sums include them
  std::vector<DeviceReport> devices{};  ///< the accelerator devices that were in use
  /// The first failed allocations, at most 16.
  std::vector<FailedAllocation> failed_allocations{};
  FileReport files{};  ///< all 0 if no file was used
  /// Reports of plan items that moved tensors while the recorder was alive, in the order of their
  /// first move.
  std::vector<MoveReport> moves{};
  /// Drops and reruns under budgets, by operator. The operator that took the most seconds to run
  /// again is first.
  std::vector<EvictionReport> evictions{};
  /// Returns a readable table, and the live bytes at failed allocations.
  std::string to_string() const;
  std::string to_json() const;  ///< returns the same numbers as one JSON object
};

/// Options of a `Recorder`: the events that it records.
struct RecorderOptions {
  /// True to sample the live bytes. CPU tensors are sampled at every event and every allocation.
  /// Devices in use of an accelerator are sampled at every event and after every operator, with the
  /// peak since the previous sample.
  bool memory = true;
  /// True to record the operators on every thread, too. Costs 1 to 3 us each.
  bool operators = false;
  /// Largest number of recorded events. Beyond it the oldest are deleted, and the report says so.
  /// Sums stay exact.
  int64_t max_events = 1 << 20;
  /// True to time regions and offload's copies on an accelerator, by events on the streams that run
  /// them.
  bool device_time = true;
};

/// Records the activity of regions on every thread of the process, until `stop` or its destruction.
/// Several recorders may be alive. Under a BudgetGuard it also records each dropped result and each
/// operator call that runs again. Without a recorder, each place that could record costs one test
/// of a flag. All functions may be called while regions run, on any thread.
/// Devices: recording does not wait for a device while regions run. `report()` and the functions
/// that draw or write look up the device times; they wait until the work recorded so far is done.
/// Each timed run takes two events of the device. The construction of a Recorder while devices are
/// in use waits for them once, to synchronize the clocks. Work that is captured as a graph is not
/// timed.
/// Memory: about 100 bytes per event, for at most `max_events` events.
/// Threads: records events of all threads, in the order of their arrival.
/// Throws: `c10::ValueError` for `max_events` below 1; `c10::Error` for a file that cannot be
/// written.
class REMAT_API Recorder {
 public:
  explicit Recorder(RecorderOptions options = {});  ///< begins to record
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  /// Ends the recording; the records stay. A second call has no effect. Two threads must not call
  /// it at the same time.
  void stop();

  Report report() const;  ///< returns the sums so far; waits for the device work that they count
  /// Returns the events in order, one line each, without times. Regions are numbered from 1 in the
  /// order in which they first appear.
  std::string event_log() const;
  /// Writes a trace for Perfetto and chrome://tracing. Regions, recomputes and operators are slices
  /// of their threads, device work is slices of streams, and live bytes are a counter for each
  /// device. Under a budget the trace also shows the calls that run again, the drops and the limit.
  void write_chrome_trace(const std::filesystem::path& path) const;
  /// Writes a picture of live bytes over time for each device, stacked by kind, with the regions
  /// below. Budgets are drawn as a line, and the operators that run again as bars.
  void write_memory_svg(const std::filesystem::path& path) const;
  /// Writes one page without scripts or other files: the pictures, values under the pointer, the
  /// tables.
  void write_html(const std::filesystem::path& path) const;
  std::string to_html() const;  ///< returns the same page

 private:
  std::shared_ptr<class Recording> recording_;
};

/// One tensor that a graph saved, or that a region would recompute for it.
struct SavedTensorInfo {
  std::string node{};                                ///< the node's name: "SinBackward0"
  std::string region{};                              ///< name of the region that dropped the tensor
  std::vector<int64_t> sizes{};                      ///< of the tensor
  at::ScalarType dtype = at::ScalarType::Undefined;  ///< of the tensor
  int64_t bytes = 0;            ///< [bytes] of its storage, or of the tensor that was dropped
  bool shares_storage = false;  ///< with an earlier entry: do not add these bytes
  bool dropped = false;         ///< dropped: a recompute will make it
  std::string module{};  ///< path of the module that saved it, under an OriginGuard (origin.h)
  std::string op{};      ///< its operator: "aten::mm"; noted on request
  std::string place{};   ///< its line: "model.py:42", or that of the module's scope
};

/// Returns the tensors that the graph below `root` saved, in the order in which backward would read
/// them. Starts no computation and no recompute. A tensor that one node saved twice is listed once.
/// A node that does not report its saved tensors is listed by name alone. A tensor that the
/// program's own hooks packed has no sizes.
/// Threads: no backward over the same graph may run meanwhile. Throws no errors of its own.
REMAT_API std::vector<SavedTensorInfo> saved_tensors(const at::Tensor& root);

}  // namespace remat
