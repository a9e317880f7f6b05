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

/// A sequence of integers as torch.Size is made by its class.
py::object size_of(const std::vector<int64_t>& sizes) {
  static PyObject* const type = imported("torch", "Size");
  return py::handle(type)(py::cast(sizes));
}

py::list saved_tensors_below(const at::Tensor& root) {
  // With the interpreter's lock, since LibTorch asks a node written in Python without taking it.
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
           "Returns False if the graph is gone. Raises what a recompute does.")
      .def("release", wrapped([](const RegionHandle& self) {
             const Unlocked unlocked;
             self.release();
           }),
           "Drops what `prepare` computed, if it belongs to no backward, group or cache yet.");
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
      "What became of calls of one operator in regions with a policy: those with the same "
      "outcome,\n"
      "for the same reason.",
      {REMAT_FACT(op, "'aten::mm.default'."),
       REMAT_FACT(outcome, "'kept', 'moved' (kept elsewhere) or 'recomputed'."),
       REMAT_FACT(reason, "What the policy answered, or why that could not be."),
       REMAT_FACT(calls, "In all first runs."),
       REMAT_FACT(bytes, "[bytes] that these calls keep; results that nobody reads have none.")});
}

void add_region_report(py::module_& module) {
  using R = RegionReport;
  add_report<R>(
      module, "RegionReport",
      "Sums over all regions of one name that began while the recorder recorded.",
      {REMAT_FACT(name, "Of the regions; '' for those without one."),
       REMAT_FACT(calls, "First runs that returned."),
       REMAT_FACT(recomputes, "Begun, also those that failed."),
       REMAT_FACT(early_stops, "Recomputes that were cut short."),
       REMAT_FACT(bytes_dropped, "[bytes] that autograd would have kept; a storage once a call."),
       REMAT_FACT(bytes_inputs, "[bytes] of inputs that stayed; none below another region."),
       REMAT_FACT(bytes_saved, "[bytes] that a policy kept."),
       REMAT_FACT(bytes_recompute_peak, "[bytes], the most that one recompute computed again."),
       REMAT_FACT(offloaded, "Results that a policy moved to the CPU."),
       REMAT_FACT(offload_fallbacks, "Results that PREFER_CPU_OFFLOAD could not move."),
       REMAT_FACT(bytes_offloaded, "[bytes] of results that a policy moved to the CPU."),
       REMAT_FACT(bytes_inputs_offloaded, "[bytes] of inputs that `offload_inputs` moved."),
       REMAT_FACT(offload_loads, "How often a recompute brought a moved result back."),
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
       REMAT_FACT(decisions, "Of its policy, in the order of their first call.")});
}

void add_device_report(py::module_& module) {
  using R = DeviceReport;
  add_report<R>(
      module, "DeviceReport", "What a recorder saw of one device of an accelerator.",
      {REMAT_FACT(device, "Which one: a torch.device."),
       REMAT_FACT(is_exact, "Bytes are those asked for; if not, as the allocator rounds them."),
       REMAT_FACT(peak_bytes, "[bytes], the most alive at once."),
       REMAT_FACT(bytes_out, "[bytes] copied to the host beside the work: offload."),
       REMAT_FACT(bytes_in, "[bytes] copied back."),
       REMAT_FACT(copies_out_s, "[seconds] on the device of the copies out."),
       REMAT_FACT(copies_in_s, "[seconds] on the device of the copies back."),
       REMAT_FACT(waited_s,
                  "[seconds] that streams stood still since a copy back was not there.")});
}

void add_file_report(py::module_& module) {
  using R = FileReport;
  add_report<R>(
      module, "FileReport", "What a recorder saw of the files of offload and tiers.",
      {REMAT_FACT(bytes_written, "[bytes] moved to files."),
       REMAT_FACT(bytes_read, "[bytes] brought back."),
       REMAT_FACT(write_s, "[seconds] of writing, on any thread."),
       REMAT_FACT(read_s, "[seconds] of reading, on any thread."),
       REMAT_FACT(waits, "How often a thread of the program's read, wrote or waited itself."),
       REMAT_FACT(waited_s, "[seconds] of that: what was not done beside the program.")});
}

void add_move_report(py::module_& module) {
  using R = MoveReport;
  add_report<R>(
      module, "MoveReport",
      "What the items of plans that have one name moved: stages, or regions with their name.",
      {REMAT_FACT(name, "'stage 2', 'stages 3 to 5'."),
       REMAT_FACT(moves, "Copies to where it waits."), REMAT_FACT(bytes_moved, "[bytes] of these."),
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
                "What regions of one name held when an allocation did not fit.",
                {REMAT_FACT(region, "The name; '' for regions without one."),
                 REMAT_FACT(regions, "How many."),
                 REMAT_FACT(inputs_bytes, "[bytes] of inputs that stayed; a storage once."),
                 REMAT_FACT(saved_bytes, "[bytes] that a policy kept."),
                 REMAT_FACT(recomputed_bytes, "[bytes] recomputed and not yet handed over.")});
}

void add_failed_allocation(py::module_& module) {
  using R = FailedAllocation;
  add_report<R>(
      module, "FailedAllocation",
      "What was alive when an allocation did not fit: on an accelerator, or under `memory_limit`.",
      {REMAT_FACT(device, "Where it did not fit: a torch.device."),
       REMAT_FACT(asked_bytes, "[bytes] asked for; -1: the device's allocator does not tell."),
       REMAT_FACT(live_bytes, "[bytes] of all tensors there."),
       REMAT_FACT(parameters_bytes, "[bytes] of parameters that regions use."),
       REMAT_FACT(held, "By region; what held most first.")});
}

void add_sums(py::module_& module) {
  using R = Report;
  add_report<R>(
      module, "Report", "What a recorder counted, by region name; `str` makes a table of it.",
      {REMAT_FACT(regions, "In the order of their first call."),
       REMAT_FACT(dropped_events, "That `max_events` left no room for; sums count them."),
       REMAT_FACT(devices, "Of accelerators that were in use."),
       REMAT_FACT(failed_allocations, "The first that failed, 16 at most."),
       REMAT_FACT(files, "All 0 where nothing went to a file."),
       REMAT_FACT(moves, "Of plans that moved something, in the order of their first move."),
       REMAT_FACT(evictions,
                  "By operator, under budgets; the one that took the most seconds to run again is "
                  "first.")})
      .def("__str__", &Report::to_string)
      .def("to_json", &Report::to_json, "The same numbers as one JSON object, as text.");
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
      "there. Make it before the tensors that shall be counted. Not counted: older tensors, "
      "`from_numpy`, pinned\n"
      "memory. An accelerator: what its allocator says of all the process's tensors there, "
      "whenever they were\n"
      "made; starting a peak resets the one that `torch.cuda.max_memory_allocated` reads. "
      "Threads: any.\n"
      "Raises CheckpointError (UNSUPPORTED) for a device whose allocator does not tell.")
      .def(py::init(wrapped([](const py::object& device) {
             checked("remat.MemoryMeter", "device", "Union[torch.device, str, int, None]", device);
             const c10::Device counted = device_in(device);
             return counted.is_cpu() ? std::make_unique<MemoryMeter>()
                                     : std::make_unique<MemoryMeter>(counted);
           })),
           py::arg("device") = py::none())
      .def_property_readonly("device", &MemoryMeter::device, "What is counted: a torch.device.")
      .def_property_readonly("is_exact", &MemoryMeter::is_exact,
                             "Whether bytes are those asked for, not as the allocator rounds them.")
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
