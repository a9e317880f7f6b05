// Recorders, what a graph saved, and meters of bytes.

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <vector>

#include "device.h"
#include "fields.h"
#include "python.h"
#include "remat/memory.h"
#include "remat/origin.h"
#include "remat/region_handle.h"
#include "remat/report.h"

namespace remat::python {

namespace {

/// Converts a sequence of integers to torch.Size, by its class.
py::object size_of(const std::vector<int64_t>& sizes) {
  static PyObject* const type = imported("torch", "Size");
  return py::handle(type)(py::cast(sizes));
}

py::list saved_tensors_below(const at::Tensor& root) {
  // The lock is taken here, since LibTorch asks a node written in Python without taking it.
  const std::vector<SavedTensorInfo> found = saved_tensors(root);
  py::list all;
  for (const SavedTensorInfo& each : found) {
    const py::object dtype =
        each.dtype == at::ScalarType::Undefined ? py::object(py::none()) : py::cast(each.dtype);
    all.append(py::make_tuple(each.node, each.region, size_of(each.sizes), dtype, each.bytes,
                              each.shares_storage, each.dropped, each.module, each.op, each.place));
  }
  return all;
}

py::list regions_behind(const at::Tensor& root) {
  py::list all;
  for (RegionHandle& each : regions_of(root))
    all.append(std::make_shared<RegionHandle>(std::move(each)));
  return all;
}

void add_region_handle(py::module_& module) {
  py::class_<RegionHandle, std::shared_ptr<RegionHandle>>(
      module, "RegionHandle",
      "Refers to one region weakly: it keeps neither the graph nor the region's tensors alive.\n"
      "Made by `regions_of`, or by the program for `checkpoint(..., handle=handle)`. Threads: any.")
      .def(py::init<>())
      .def_property_readonly("name", &RegionHandle::name,
                             "The region's name; '' if its graph is gone.")
      .def("prepare", wrapped([](const RegionHandle& self) {
             const Unlocked unlocked;
             return self.prepare();
           }),
           "Recomputes the region now, on this thread; on an accelerator on a stream of remat's\n"
           "own, unless the region has buffers or state providers. The tensors belong to the next\n"
           "backward that reads them, or to the group or cache around this call. A region inside\n"
           "others prepares those first. Does nothing if recomputed tensors are there already.\n"
           "Returns False if the graph is gone. Raises as a recompute does.")
      .def("release", wrapped([](const RegionHandle& self) {
             const Unlocked unlocked;
             self.release();
           }),
           "Drops the tensors of `prepare`, if they belong to no backward, group or cache yet.");
  module.def("_regions_of", wrapped(regions_behind));
}

/// The OriginGuard of a `track_origins`, with the scopes of the modules that run. One thread.
class Origins {
 public:
  explicit Origins(const py::object& place)
      : guard_({.operators = !place.is_none(), .place = place_in(place)}) {}
  void enter(const std::string& path) {
    scopes_.push_back(std::make_unique<ModuleScope>(path, SourceLocation{}));
  }
  void leave() {
    if (!scopes_.empty()) scopes_.pop_back();
  }

 private:
  static std::function<std::string()> place_in(const py::object& place) {
    if (place.is_none()) return {};
    return [kept = shared(place)] {
      return call_locked([&] { return std::string(py::str(call_python(kept.get()))); });
    };
  }
  OriginGuard guard_;
  std::vector<std::unique_ptr<ModuleScope>> scopes_;
};

void add_decision_report(py::module_& module) {
  using R = DecisionReport;
  add_report<R>(
      module, "DecisionReport",
      "Calls of one operator in regions with a policy, with one outcome for the same reason.",
      {REMAT_FACT(op, "'aten::mm.default'."),
       REMAT_FACT(outcome, "'kept', 'moved' (kept elsewhere) or 'recomputed'."),
       REMAT_FACT(reason, "The policy's answer, or the reason against it."),
       REMAT_FACT(calls, "Calls in all first runs."),
       REMAT_FACT(bytes, "[bytes] that these calls keep; unread results have none.")});
}

void add_region_report(py::module_& module) {
  using R = RegionReport;
  add_report<R>(
      module, "RegionReport",
      "Sums over all regions of one name that began while the recorder recorded.",
      {REMAT_FACT(name, "The name; '' for regions without one."),
       REMAT_FACT(calls, "First runs that returned."),
       REMAT_FACT(recomputes, "Recomputes that began, also those that failed."),
       REMAT_FACT(early_stops, "Recomputes that were cut short."),
       REMAT_FACT(bytes_dropped, "[bytes] that autograd would have kept; a storage once a call."),
       REMAT_FACT(bytes_inputs, "[bytes] of inputs that stayed; none below another region."),
       REMAT_FACT(bytes_saved, "[bytes] that a policy kept."),
       REMAT_FACT(bytes_recompute_peak, "[bytes], the most that one recompute computed again."),
       REMAT_FACT(offloaded, "Results that a policy moved to the CPU."),
       REMAT_FACT(offload_fallbacks, "Results that PREFER_CPU_OFFLOAD could not move."),
       REMAT_FACT(bytes_offloaded, "[bytes] of results that a policy moved to the CPU."),
       REMAT_FACT(bytes_inputs_offloaded, "[bytes] of inputs that `offload_inputs` moved."),
       REMAT_FACT(offload_loads, "Number of moved results that recomputes brought back."),
       REMAT_FACT(offload_loads_ahead,
                  "Of these, those that were begun before the recompute asked."),
       REMAT_FACT(bytes_loaded, "[bytes] of all that recomputes brought back."),
       REMAT_FACT(offload_wait_s,
                  "[seconds] that threads spent on moving results: queueing, copying, waiting."),
       REMAT_FACT(forward_s, "[seconds] of first runs, regions inside included."),
       REMAT_FACT(recompute_s, "[seconds] of recomputes, those inside included."),
       REMAT_FACT(
           device_forward_s,
           "[seconds] of first runs on the streams they were queued on, summed over devices; 0 "
           "on the\n"
           "CPU."),
       REMAT_FACT(device_recompute_s,
                  "[seconds] of recomputes, likewise, from when their inputs were there."),
       REMAT_FACT(decisions, "A DecisionReport for each, in the order of their first call.")});
}

void add_device_report(py::module_& module) {
  using R = DeviceReport;
  add_report<R>(
      module, "DeviceReport", "Sums of a recorder for one device of an accelerator.",
      {REMAT_FACT(device, "The torch.device."),
       REMAT_FACT(is_exact, "True if bytes are the requested ones, not rounded by the allocator."),
       REMAT_FACT(peak_bytes, "[bytes], the most alive at once."),
       REMAT_FACT(bytes_out, "[bytes] copied to the host beside the work: offload."),
       REMAT_FACT(bytes_in, "[bytes] copied back."),
       REMAT_FACT(copies_out_s, "[seconds] on the device of the copies out."),
       REMAT_FACT(copies_in_s, "[seconds] on the device of the copies back."),
       REMAT_FACT(waited_s, "[seconds] that streams waited for copies back.")});
}

void add_file_report(py::module_& module) {
  using R = FileReport;
  add_report<R>(
      module, "FileReport", "Sums of a recorder for the files of offload and tiers.",
      {REMAT_FACT(bytes_written, "[bytes] moved to files."),
       REMAT_FACT(bytes_read, "[bytes] brought back."),
       REMAT_FACT(write_s, "[seconds] of writing, on any thread."),
       REMAT_FACT(read_s, "[seconds] of reading, on any thread."),
       REMAT_FACT(waits, "Times that a thread of the program read, wrote or waited itself."),
       REMAT_FACT(waited_s, "[seconds] of these, which held the program up.")});
}

void add_move_report(py::module_& module) {
  using R = MoveReport;
  add_report<R>(
      module, "MoveReport",
      "Moves of plan items that share a name: stages, or regions with their name.",
      {REMAT_FACT(name, "'stage 2', 'stages 3 to 5'."), REMAT_FACT(moves, "Copies to the place."),
       REMAT_FACT(bytes_moved, "[bytes] of these."),
       REMAT_FACT(loads, "Copies back that backward asked for."),
       REMAT_FACT(loads_ahead, "Of these, those that were begun before that."),
       REMAT_FACT(bytes_loaded, "[bytes] of `loads`."),
       REMAT_FACT(
           wait_s,
           "[seconds] that threads of the program spent on both: queueing, copying, waiting.")});
}

void add_eviction_report(py::module_& module) {
  using R = EvictionReport;
  add_report<R>(
      module, "EvictionReport",
      "Results of one operator that byte budgets dropped, and its calls that ran again.",
      {REMAT_FACT(op, "'aten::mm.default'."), REMAT_FACT(evictions, "Results dropped."),
       REMAT_FACT(bytes_evicted, "[bytes] of these."), REMAT_FACT(reruns, "Calls that ran again."),
       REMAT_FACT(bytes_rerun, "[bytes] of the results made again."),
       REMAT_FACT(rerun_s, "[seconds] of these calls."),
       REMAT_FACT(moves, "Results moved away instead of dropped."),
       REMAT_FACT(bytes_moved, "[bytes] of these.")});
}

void add_held_bytes(py::module_& module) {
  using R = FailedAllocation::Held;
  add_report<R>(module, "HeldBytes",
                "[bytes] that regions of one name held when an allocation did not fit.",
                {REMAT_FACT(region, "The name; '' for regions without one."),
                 REMAT_FACT(regions, "The number of regions."),
                 REMAT_FACT(inputs_bytes, "[bytes] of inputs that stayed; a storage once."),
                 REMAT_FACT(saved_bytes, "[bytes] that a policy kept."),
                 REMAT_FACT(recomputed_bytes, "[bytes] recomputed and not yet handed over.")});
}

void add_failed_allocation(py::module_& module) {
  using R = FailedAllocation;
  add_report<R>(
      module, "FailedAllocation",
      "Memory at a failed allocation, of an accelerator or under `memory_limit`.",
      {REMAT_FACT(device, "The torch.device without room."),
       REMAT_FACT(asked_bytes, "The requested bytes; -1: the allocator does not report them."),
       REMAT_FACT(live_bytes, "[bytes] of all tensors there."),
       REMAT_FACT(parameters_bytes, "[bytes] of parameters that regions use."),
       REMAT_FACT(held, "A HeldBytes for each region, the largest first.")});
}

void add_sums(py::module_& module) {
  using R = Report;
  add_report<R>(
      module, "Report", "Counts of a recorder by region name; `str` makes a table of them.",
      {REMAT_FACT(regions, "A RegionReport for each name, in the order of the first calls."),
       REMAT_FACT(dropped_events, "Events beyond `max_events`; sums count them."),
       REMAT_FACT(devices, "A DeviceReport for each accelerator in use."),
       REMAT_FACT(failed_allocations, "The first allocations that failed, 16 at most."),
       REMAT_FACT(files, "A FileReport, all 0 if nothing went to a file."),
       REMAT_FACT(moves, "A MoveReport for each name, in the order of the first moves."),
       REMAT_FACT(evictions,
                  "An EvictionReport for each operator under budgets, the most seconds first.")})
      .def("__str__", &Report::to_string)
      .def("to_json", &Report::to_json, "Returns the same numbers as the text of one JSON object.");
}

void add_recorder(py::module_& module) {
  const auto unlocked = py::call_guard<Unlocked>();
  py::class_<Recorder>(module, "_Recorder")
      .def(py::init([](bool memory, bool operators, int64_t max_events, bool device_time) {
        return std::make_unique<Recorder>(RecorderOptions{.memory = memory,
                                                          .operators = operators,
                                                          .max_events = max_events,
                                                          .device_time = device_time});
      }))
      .def("stop", &Recorder::stop, unlocked)
      .def("report", &Recorder::report, unlocked)
      .def("event_log", &Recorder::event_log, unlocked)
      .def("page", &Recorder::to_html, unlocked)
      .def(
          "write_chrome_trace",
          [](const Recorder& self, const std::string& path) { self.write_chrome_trace(path); },
          unlocked)
      .def(
          "write_memory_svg",
          [](const Recorder& self, const std::string& path) { self.write_memory_svg(path); },
          unlocked)
      .def(
          "write_html",
          [](const Recorder& self, const std::string& path) { self.write_html(path); }, unlocked);
}

void add_meter(py::module_& module) {
  py::class_<MemoryMeter>(
      module, "MemoryMeter",
      "MemoryMeter(device=None): counts the bytes that torch's allocator of the CPU, or of "
      "another device, has\n"
      "given out and not got back.\n"
      "\n"
      "The CPU: exactly. The first meter of the process puts a counting allocator in front of "
      "the one that is\n"
      "there. Make it before the tensors to be counted. It does not count older tensors, "
      "`from_numpy`, pinned\n"
      "memory. An accelerator: the bytes of all the process's tensors there by its allocator, "
      "whenever they were\n"
      "made; starting a peak resets the one that `torch.cuda.max_memory_allocated` reads. "
      "Threads: any.\n"
      "Raises CheckpointError (UNSUPPORTED) for a device whose allocator does not report bytes.")
      .def(py::init(wrapped([](const py::object& device) {
             checked("remat.MemoryMeter", "device", "Union[torch.device, str, int, None]", device);
             const c10::Device counted = device_in(device);
             return counted.is_cpu() ? std::make_unique<MemoryMeter>()
                                     : std::make_unique<MemoryMeter>(counted);
           })),
           py::arg("device") = py::none())
      .def_property_readonly("device", &MemoryMeter::device, "The torch.device that is counted.")
      .def_property_readonly("is_exact", &MemoryMeter::is_exact,
                             "True if bytes are the requested ones, not rounded by the allocator.")
      .def_property_readonly("live_bytes", &MemoryMeter::live_bytes,
                             "[bytes] alive now in the whole process: the same for every meter.")
      .def_property_readonly(
          "peak_bytes", &MemoryMeter::peak_bytes,
          "[bytes], the most at one moment since the meter was made or `reset_peak`.")
      .def("reset_peak", &MemoryMeter::reset_peak, "Starts a new peak at the present live bytes.");
}

}  // namespace

void add_observe(py::module_& module) {
  add_region_handle(module);
  add_decision_report(module);
  add_region_report(module);
  add_device_report(module);
  add_file_report(module);
  add_move_report(module);
  add_eviction_report(module);
  add_held_bytes(module);
  add_failed_allocation(module);
  add_sums(module);
  add_recorder(module);
  add_meter(module);
  py::class_<Origins>(module, "_Origins")
      .def(py::init<const py::object&>())
      .def("enter", &Origins::enter)
      .def("leave", &Origins::leave);
  module.def("_saved_tensors", wrapped(saved_tensors_below));
  module.def("_free_bytes",
             wrapped([](const py::object& device) { return free_bytes(device_in(device)); }));
}

}  // namespace remat::python
