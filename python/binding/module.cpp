// The extension module `remat._remat`: what it defines, source by source.

#include "python.h"
#include "remat/binding.h"
#include "remat/report.h"
#include "remat/scope.h"

namespace remat::python {

namespace {

py::dict counters() {
  using namespace py::literals;
  const Counters now = remat::counters();
  return py::dict("frames_created"_a = now.frames_created, "frames_alive"_a = now.frames_alive,
                  "recomputes"_a = now.recomputes, "early_stops"_a = now.early_stops,
                  "tensors_dropped"_a = now.tensors_dropped,
                  "tensors_recomputed"_a = now.tensors_recomputed,
                  "recomputed_bytes_alive"_a = now.recomputed_bytes_alive);
}

}  // namespace

}  // namespace remat::python

// Before anything else: a body's vtable must be the one that the library calls.
PYBIND11_MODULE(_remat, module) {
  using namespace remat::python;
  if (remat::loaded_binding_abi() != remat::binding_abi) {
    PyErr_Format(
        PyExc_ImportError,
        "remat: the extension module was built for libremat's binding number %d, and the library "
        "that is loaded has %d. Hint: install the package again, so that both come from one build.",
        remat::binding_abi, remat::loaded_binding_abi());
    throw py::error_already_set();
  }
  add_process(module);
  add_stop();
  add_hook_tables();
  for (const auto add : {add_policy, add_checkpoint, add_hook_cycles, add_drop_in, add_backward,
                         add_save_region, add_paths, add_guards, add_observe, add_plan, add_budget})
    add(module);
  module.def("counters", counters);
  module.def("is_checkpointing", remat::is_checkpointing);
  module.def("is_checkpointing_disabled", remat::is_checkpointing_disabled);
  module.def("is_recomputing", remat::is_recomputing);
}
