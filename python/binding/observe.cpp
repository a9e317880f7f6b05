// Recorders, what a graph saved, and meters of bytes.

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <vector>

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
    const py::gil_scoped_release unlocked;  // a node written in Python is asked with the lock
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
      .def_readonly("forward_s", &RegionReport::forward_s,
                    "[seconds] of first runs, regions inside included.")
      .def_readonly("recompute_s", &RegionReport::recompute_s,
                    "[seconds] of recomputes, those inside included.");
  py::class_<Report>(module, "Report",
                     "What a recorder counted, by region name; `str` makes a table of it.")
      .def_readonly("regions", &Report::regions, "In the order of their first call.")
      .def_readonly("dropped_events", &Report::dropped_events,
                    "That `max_events` left no room for; sums count them.")
      .def("__str__", &Report::to_string)
      .def("to_json", &Report::to_json, "The same numbers as one JSON object, as text.");

  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<Recorder>(module, "_Recorder")
      .def(py::init([](bool memory, bool operators, int64_t max_events) {
        return std::make_unique<Recorder>(
            RecorderOptions{.memory = memory, .operators = operators, .max_events = max_events});
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
      "Counts the bytes that torch's CPU allocator has given out and not got back, exactly.\n\n"
      "The first meter of the process puts a counting allocator in front of the one that is there. Make it\n"
      "before the tensors that shall be counted. Not counted: older tensors, `from_numpy`, pinned and\n"
      "accelerator memory. Threads: any.")
      .def(py::init<>())
      .def_property_readonly("live_bytes", &MemoryMeter::live_bytes,
                             "[bytes] alive now in the whole process: the same for every meter.")
      .def_property_readonly(
          "peak_bytes", &MemoryMeter::peak_bytes,
          "[bytes], the most at one moment since the meter was made or `reset_peak`.")
      .def("reset_peak", &MemoryMeter::reset_peak, "Starts a new peak at the present live bytes.");
}

}  // namespace remat::python
