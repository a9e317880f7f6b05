// The extension module `remat._remat`: what it defines, source by source.

#include "python.h"
#include "remat/binding.h"
#include "remat/report.h"
#include "remat/scope.h"
#include "scope.h"

namespace remat::python {

void add_budget(py::module_& module);  // budget.cpp

namespace {

py::dict counters() {
  const Counters now = remat::counters();
  py::dict all;
  all["frames_created"] = now.frames_created;
  all["frames_alive"] = now.frames_alive;
  all["recomputes"] = now.recomputes;
  all["early_stops"] = now.early_stops;
  all["tensors_dropped"] = now.tensors_dropped;
  all["tensors_recomputed"] = now.tensors_recomputed;
  all["recomputed_bytes_alive"] = now.recomputed_bytes_alive;
  return all;
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
  add_hook_tables();
  add_policy(module);
  add_region(module);
  add_stop(module);
  add_hook_cycles(module);
  add_drop_in(module);
  add_backward(module);
  add_modules(module);
  add_save_region(module);
  add_guards(module);
  add_observe(module);
  add_plan(module);
  add_budget(module);
  module.def("counters", counters);
  module.def("is_checkpointing", remat::is_checkpointing);
  module.def("is_recomputing", remat::is_recomputing);
  add_guard<remat::GraphExecGroup>(module, "GraphExecGroup");
}
