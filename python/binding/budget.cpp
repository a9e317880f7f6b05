// A byte budget without regions: its guard, its report and its errors.

#include <ATen/Parallel.h>

#include <memory>
#include <optional>
#include <string>

#include "device.h"
#include "fields.h"
#include "moving.h"
#include "python.h"
#include "remat/budget.h"

namespace remat::python {

namespace {

/// A BudgetGuard, open from its making to `end`. One thread.
class OpenBudget {
 public:
  explicit OpenBudget(const BudgetOptions& options)
      : guard_(std::make_unique<BudgetGuard>(options)), counters_(guard_->counters()) {}
  void end() { guard_.reset(); }
  BudgetReport now() const { return counters_.now(); }
  void reset() { counters_.reset(); }

 private:
  std::unique_ptr<BudgetGuard> guard_;
  BudgetCounters counters_;
};

// An operator's own threads cannot take the interpreter's lock: the thread that waits for them may
// hold it. Their errors arrive as torch translates them.
void raise(const c10::Error& error) {
  if (at::in_parallel_region()) return;
  const Locked locked(Locked::AtEnd::GiveUp);
  if (!locked) return;
  const auto* const exceeded = dynamic_cast<const BudgetExceeded*>(&error);
  PyObject* const made = in_python([&] {
    return PyObject_CallFunction(
        names().make_budget_error, "sLL", error.what_without_backtrace(),
        static_cast<long long>(exceeded == nullptr ? -1 : exceeded->needed_bytes()),
        static_cast<long long>(exceeded == nullptr ? -1 : exceeded->floor_bytes()));
  });
  if (made != nullptr) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made)), made);
    Py_DECREF(made);
  }
  throw_persisted();
}

}  // namespace

void add_budget(py::module_& module) {
  using R = BudgetReport;
  add_report<R>(
      module, "BudgetReport", "Counts of a budget since its scope began, or since `reset`.",
      {REMAT_FACT(budget_bytes, "The requested budget [bytes]."),
       REMAT_FACT(peak_bytes, "[bytes], the most alive beyond the memory at the scope's begin."),
       REMAT_FACT(
           floor_bytes,
           "[bytes], the most alive at one moment that could not be dropped, beyond the memory at\n"
           "the scope's begin: no budget below this can hold."),
       REMAT_FACT(source_bytes, "[bytes] alive now because recorded calls may need them again."),
       REMAT_FACT(over_bytes, "[bytes] by which the budget was exceeded at the most."),
       REMAT_FACT(over_count, "Number of allocations that found no room."),
       REMAT_FACT(evictions, "Values dropped."),
       REMAT_FACT(reruns, "Operator calls that ran again."),
       REMAT_FACT(moves, "Values moved away instead."),
       REMAT_FACT(operators, "Operator calls recorded."),
       REMAT_FACT(rerun_s, "[seconds] spent in calls that ran again."),
       REMAT_FACT(search_s, "[seconds] spent in choosing values to drop.")})
      .def("__str__", &BudgetReport::to_string);
  py::class_<OpenBudget>(module, "_OpenBudget",
                         "A budget, open until `end`; its report outlives it.")
      .def("end", wrapped([](OpenBudget& self) { self.end(); }))
      .def("now", &OpenBudget::now)
      .def("reset", &OpenBudget::reset);
  module.def("_open_budget",
             wrapped([](int64_t bytes, const py::object& device, bool throws, int64_t min_bytes,
                        bool check_values, const py::object& moving) {
               BudgetOptions options{.bytes = bytes,
                                     .device = device_in(device),
                                     .over = throws ? OverBudget::Throw : OverBudget::Continue,
                                     .min_bytes = min_bytes,
                                     .check_values = check_values};
               if (!moving.is_none()) options.moving = moving_in(moving);
               return std::make_unique<OpenBudget>(options);
             }));
  set_budget_raise(raise);
}

}  // namespace remat::python
