// A byte budget without regions: its guard, its report and its errors.

#include <ATen/Parallel.h>

#include <memory>
#include <optional>
#include <string>

#include "device.h"
#include "python.h"
#include "remat/budget.h"

namespace remat::python {

namespace {

PyObject* make_error_of_budget = nullptr;  // set once, at import; never freed

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
        make_error_of_budget, "sLL", error.what_without_backtrace(),
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

void add_budget(py::module_& module);

void add_budget(py::module_& module) {
  py::class_<BudgetReport>(module, "BudgetReport",
                           "What a budget has done since its scope began, or since `reset`.")
      .def_readonly("budget_bytes", &BudgetReport::budget_bytes, "[bytes] as asked for.")
      .def_readonly("peak_bytes", &BudgetReport::peak_bytes,
                    "[bytes], the most that was alive beyond what the scope found.")
      .def_readonly(
          "floor_bytes", &BudgetReport::floor_bytes,
          "[bytes], the most that was alive at one moment and could not be dropped, beyond\n"
          "what the scope found: no budget below this can hold.")
      .def_readonly("source_bytes", &BudgetReport::source_bytes,
                    "[bytes] alive now because recorded calls may need them again.")
      .def_readonly("over_bytes", &BudgetReport::over_bytes,
                    "[bytes] by which the budget was exceeded at the most.")
      .def_readonly("over_count", &BudgetReport::over_count,
                    "Number of allocations that exceeded it.")
      .def_readonly("evictions", &BudgetReport::evictions, "Values dropped.")
      .def_readonly("reruns", &BudgetReport::reruns, "Operator calls that ran again.")
      .def_readonly("moves", &BudgetReport::moves, "Values moved away instead.")
      .def_readonly("operators", &BudgetReport::operators, "Operator calls recorded.")
      .def_readonly("rerun_s", &BudgetReport::rerun_s, "[seconds] spent in calls that ran again.")
      .def_readonly("search_s", &BudgetReport::search_s,
                    "[seconds] spent in choosing values to drop.")
      .def("__str__", &BudgetReport::to_string);
  py::class_<OpenBudget>(module, "OpenBudget",
                         "A budget, open until `end`; its report outlives it.")
      .def("end", torch::wrap_pybind_function([](OpenBudget& self) { self.end(); }))
      .def("now", &OpenBudget::now)
      .def("reset", &OpenBudget::reset);
  using MoveTuple = std::tuple<std::string, int64_t, bool>;
  module.def("_open_budget",
             torch::wrap_pybind_function([](int64_t bytes, const py::object& device, bool throws,
                                            int64_t min_bytes, bool check_values,
                                            const std::optional<MoveTuple>& moving) {
               BudgetOptions options{.bytes = bytes,
                                     .device = device_in(device),
                                     .over = throws ? OverBudget::Throw : OverBudget::Continue,
                                     .min_bytes = min_bytes,
                                     .check_values = check_values};
               if (moving)
                 options.moving = MoveOptions{.directory = std::get<0>(*moving),
                                              .min_bytes = std::get<1>(*moving),
                                              .pin_memory = std::get<2>(*moving)};
               return with_package_errors(
                   [&] { return std::make_unique<OpenBudget>(std::move(options)); });
             }));
  module.def("_set_budget_errors", [](py::object make) {
    make_error_of_budget = make.release().ptr();
    set_budget_raise(raise);
  });
}

}  // namespace remat::python
