// Recorders, what a graph saved, and meters of bytes.

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <vector>

#include "device.h"
#include "python.h"
#include "remat/memory.h"
#include "remat/report.h"

namespace remat::python {

namespace {

/// A sequence of integers as torch.Size is made by its class.
py::object size_of(const std::vector<int64_t>& sizes) {
  static PyObject* const type =
      py::object(py::module_::import("torch").attr("Size")).release().ptr();
  return py::handle(type)(py::cast(sizes));
}

py::list saved_tensors_below(const at::Tensor& root) {
  std::vector<SavedTensorInfo> found;
  {
    const Unlocked unlocked;  // a node written in Python is asked with the lock
    found = saved_tensors(root);
  }
  py::list all;
  for (const SavedTensorInfo& each : found) {
    const py::object dtype =
        each.dtype == at::ScalarType::Undefined ? py::object(py::none()) : py::cast(each.dtype);
    all.append(py::make_tuple(each.node, each.region, size_of(each.sizes), dtype, each.bytes,
                              each.shares_storage, each.dropped));
  }
  return all;
}

}  // namespace

void add_observe(py::module_& module) {
  py::class_<DecisionReport>(
      module, "DecisionReport",
      "What became of calls of one operator in regions with a policy: those with the same outcome,\n"
      "for the same reason.")
      .def_readonly("op", &DecisionReport::op, "'aten::mm.default'.")
      .def_readonly("outcome", &DecisionReport::outcome,
                    "'kept', 'moved' (kept elsewhere) or 'recomputed'.")
      .def_readonly("reason", &DecisionReport::reason,
                    "What the policy answered, or why that could not be.")
      .def_readonly("calls", &DecisionReport::calls, "In all first runs.")
      .def_readonly("bytes", &DecisionReport::bytes,
                    "[bytes] that these calls keep; results that nobody reads have none.");
  py::class_<RegionReport>(
      module, "RegionReport",
      "Sums over all regions of one name that began while the recorder recorded.")
      .def_readonly("name", &RegionReport::name, "Of the regions; '' for those without one.")
      .def_readonly("calls", &RegionReport::calls, "First runs that returned.")
      .def_readonly("recomputes", &RegionReport::recomputes, "Begun, also those that failed.")
      .def_readonly("early_stops", &RegionReport::early_stops, "Recomputes that were cut short.")
      .def_readonly("bytes_dropped", &RegionReport::bytes_dropped,
                    "[bytes] that autograd would have kept; a storage once a call.")
      .def_readonly("bytes_inputs", &RegionReport::bytes_inputs,
                    "[bytes] of inputs that stayed; none below another region.")
      .def_readonly("bytes_saved", &RegionReport::bytes_saved, "[bytes] that a policy kept.")
      .def_readonly("bytes_recompute_peak", &RegionReport::bytes_recompute_peak,
                    "[bytes], the most that one recompute computed again.")
      .def_readonly("offloaded", &RegionReport::offloaded,
                    "Results that a policy moved to the CPU.")
      .def_readonly("offload_fallbacks", &RegionReport::offload_fallbacks,
                    "Results that PREFER_CPU_OFFLOAD could not move.")
      .def_readonly("bytes_offloaded", &RegionReport::bytes_offloaded,
                    "[bytes] of results that a policy moved to the CPU.")
      .def_readonly("bytes_inputs_offloaded", &RegionReport::bytes_inputs_offloaded,
                    "[bytes] of inputs that `offload_inputs` moved.")
      .def_readonly("offload_loads", &RegionReport::offload_loads,
                    "How often a recompute brought a moved result back.")
      .def_readonly("offload_loads_ahead", &RegionReport::offload_loads_ahead,
                    "Of these, those that were begun before the recompute asked.")
      .def_readonly("bytes_loaded", &RegionReport::bytes_loaded,
                    "[bytes] of all that recomputes brought back.")
      .def_readonly("offload_wait_s", &RegionReport::offload_wait_s,
                    "[seconds] that threads spent on moving results: queueing, copying, waiting.")
      .def_readonly("forward_s", &RegionReport::forward_s,
                    "[seconds] of first runs, regions inside included.")
      .def_readonly("recompute_s", &RegionReport::recompute_s,
                    "[seconds] of recomputes, those inside included.")
      .def_readonly(
          "device_forward_s", &RegionReport::device_forward_s,
          "[seconds] of first runs on the streams they were queued on, summed over devices; 0 on the\n"
          "CPU.")
      .def_readonly("device_recompute_s", &RegionReport::device_recompute_s,
                    "[seconds] of recomputes, likewise, from when their inputs were there.")
      .def_readonly("decisions", &RegionReport::decisions,
                    "Of its policy, in the order of their first call.");
  py::class_<DeviceReport>(module, "DeviceReport",
                           "What a recorder saw of one device of an accelerator.")
      .def_readonly("device", &DeviceReport::device, "Which one: a torch.device.")
      .def_readonly("is_exact", &DeviceReport::is_exact,
                    "Bytes are those asked for; if not, as the allocator rounds them.")
      .def_readonly("peak_bytes", &DeviceReport::peak_bytes, "[bytes], the most alive at once.")
      .def_readonly("bytes_out", &DeviceReport::bytes_out,
                    "[bytes] copied to the host beside the work: offload.")
      .def_readonly("bytes_in", &DeviceReport::bytes_in, "[bytes] copied back.")
      .def_readonly("copies_out_s", &DeviceReport::copies_out_s,
                    "[seconds] on the device of the copies out.")
      .def_readonly("copies_in_s", &DeviceReport::copies_in_s,
                    "[seconds] on the device of the copies back.")
      .def_readonly("waited_s", &DeviceReport::waited_s,
                    "[seconds] that streams stood still since a copy back was not there.");
  py::class_<FileReport>(module, "FileReport",
                         "What a recorder saw of the files of offload and tiers.")
      .def_readonly("bytes_written", &FileReport::bytes_written, "[bytes] moved to files.")
      .def_readonly("bytes_read", &FileReport::bytes_read, "[bytes] brought back.")
      .def_readonly("write_s", &FileReport::write_s, "[seconds] of writing, on any thread.")
      .def_readonly("read_s", &FileReport::read_s, "[seconds] of reading, on any thread.")
      .def_readonly("waits", &FileReport::waits,
                    "How often a thread of the program's read, wrote or waited itself.")
      .def_readonly("waited_s", &FileReport::waited_s,
                    "[seconds] of that: what was not done beside the program.");
  py::class_<MoveReport>(
      module, "MoveReport",
      "What the items of plans that have one name moved: stages, or regions with their name.")
      .def_readonly("name", &MoveReport::name, "'stage 2', 'stages 3 to 5'.")
      .def_readonly("moves", &MoveReport::moves, "Copies to where it waits.")
      .def_readonly("bytes_moved", &MoveReport::bytes_moved, "[bytes] of these.")
      .def_readonly("loads", &MoveReport::loads, "Copies back that backward asked for.")
      .def_readonly("loads_ahead", &MoveReport::loads_ahead,
                    "Of these, those that were begun before that.")
      .def_readonly("bytes_loaded", &MoveReport::bytes_loaded, "[bytes] of `loads`.")
      .def_readonly(
          "wait_s", &MoveReport::wait_s,
          "[seconds] that threads of the program spent on both: queueing, copying, waiting.");
  py::class_<EvictionReport>(
      module, "EvictionReport",
      "Results of one operator that byte budgets dropped, and its calls that ran again.")
      .def_readonly("op", &EvictionReport::op, "'aten::mm.default'.")
      .def_readonly("evictions", &EvictionReport::evictions, "Results dropped.")
      .def_readonly("bytes_evicted", &EvictionReport::bytes_evicted, "[bytes] of these.")
      .def_readonly("reruns", &EvictionReport::reruns, "Calls that ran again.")
      .def_readonly("bytes_rerun", &EvictionReport::bytes_rerun,
                    "[bytes] of the results made again.")
      .def_readonly("rerun_s", &EvictionReport::rerun_s, "[seconds] of these calls.")
      .def_readonly("moves", &EvictionReport::moves, "Results moved away instead of dropped.")
      .def_readonly("bytes_moved", &EvictionReport::bytes_moved, "[bytes] of these.");
  using Held = FailedAllocation::Held;
  py::class_<Held>(module, "HeldBytes",
                   "What regions of one name held when an allocation did not fit.")
      .def_readonly("region", &Held::region, "The name; '' for regions without one.")
      .def_readonly("regions", &Held::regions, "How many.")
      .def_readonly("inputs_bytes", &Held::inputs_bytes,
                    "[bytes] of inputs that stayed; a storage once.")
      .def_readonly("saved_bytes", &Held::saved_bytes, "[bytes] that a policy kept.")
      .def_readonly("recomputed_bytes", &Held::recomputed_bytes,
                    "[bytes] recomputed and not yet handed over.");
  py::class_<FailedAllocation>(
      module, "FailedAllocation",
      "What was alive when an allocation did not fit: on an accelerator, or under `memory_limit`.")
      .def_readonly("device", &FailedAllocation::device, "Where it did not fit: a torch.device.")
      .def_readonly("asked_bytes", &FailedAllocation::asked_bytes,
                    "[bytes] asked for; -1: the device's allocator does not tell.")
      .def_readonly("live_bytes", &FailedAllocation::live_bytes, "[bytes] of all tensors there.")
      .def_readonly("parameters_bytes", &FailedAllocation::parameters_bytes,
                    "[bytes] of parameters that regions use.")
      .def_readonly("held", &FailedAllocation::held, "By region; what held most first.");
  py::class_<Report>(module, "Report",
                     "What a recorder counted, by region name; `str` makes a table of it.")
      .def_readonly("regions", &Report::regions, "In the order of their first call.")
      .def_readonly("dropped_events", &Report::dropped_events,
                    "That `max_events` left no room for; sums count them.")
      .def_readonly("devices", &Report::devices, "Of accelerators that were in use.")
      .def_readonly("failed_allocations", &Report::failed_allocations,
                    "The first that failed, 16 at most.")
      .def_readonly("files", &Report::files, "All 0 where nothing went to a file.")
      .def_readonly("moves", &Report::moves,
                    "Of plans that moved something, in the order of their first move.")
      .def_readonly(
          "evictions", &Report::evictions,
          "By operator, under budgets; the one that took the most seconds to run again is "
          "first.")
      .def("__str__", &Report::to_string)
      .def("to_json", &Report::to_json, "The same numbers as one JSON object, as text.");

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
  module.def("_saved_tensors", torch::wrap_pybind_function(saved_tensors_below));

  py::class_<MemoryMeter>(
      module, "MemoryMeter",
      "MemoryMeter(device=None): counts the bytes that torch's allocator of the CPU, or of another device, has\n"
      "given out and not got back.\n\n"
      "The CPU: exactly. The first meter of the process puts a counting allocator in front of the one that is\n"
      "there. Make it before the tensors that shall be counted. Not counted: older tensors, `from_numpy`, pinned\n"
      "memory. An accelerator: what its allocator says of all the process's tensors there, whenever they were\n"
      "made; starting a peak resets the one that `torch.cuda.max_memory_allocated` reads. Threads: any.\n"
      "Raises CheckpointError (UNSUPPORTED) for a device whose allocator does not tell.")
      .def(py::init([](const py::object& device) {
             const c10::Device counted = device_in(device);
             return with_package_errors([&] {
               return counted.is_cpu() ? std::make_unique<MemoryMeter>()
                                       : std::make_unique<MemoryMeter>(counted);
             });
           }),
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
  module.def("_free_bytes", torch::wrap_pybind_function([](const py::object& device) {
               const c10::Device asked = device_in(device);
               return with_package_errors([&] { return free_bytes(asked); });
             }));
}

}  // namespace remat::python
