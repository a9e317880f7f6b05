// The planner.

#include <torch/csrc/autograd/python_variable.h>

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "device.h"
#include "fields.h"
#include "moving.h"
#include "plan_runs.h"
#include "remat/binding.h"
#include "remat/fit.h"
#include "remat/options.h"
#include "remat/plan.h"

namespace remat::python {

namespace {

// ---- costs, as the named tuples of remat/_plan.py

/// Calls `action` with the cost and all its members, in the order of the named tuple.
template <class Cost, class Action>
auto with_members(Cost& cost, Action&& action) {
  using S = StageCost;
  return action(cost, &S::forward_s, &S::backward_s, &S::forward_to_last_save_s, &S::output_bytes,
                &S::saved_bytes, &S::forward_tmp_bytes, &S::backward_tmp_bytes, &S::grad_bytes,
                &S::saves_output, &S::unsaved_tmp_bytes, &S::movable_bytes, &S::has_movable_output,
                &S::first_read_tmp_bytes, &S::stopped_tmp_bytes, &S::saves_input,
                &S::backward_bytes, &S::region_backward_bytes, &S::lone_backward_bytes);
}

ChainCost cost_in(const py::tuple& given) {
  const auto [input, input_grad, stages, rounding, moving, cached, held] =
      given.cast<std::tuple<int64_t, int64_t, py::tuple, double, py::object, int64_t, int64_t>>();
  ChainCost cost{input, input_grad, {}, rounding};
  cost.cached_cast_bytes = cached;
  cost.held_to_end_bytes = held;
  if (!moving.is_none())
    read_members(cost.moving.emplace(), moving, &MoveCost::store_s_per_byte,
                 &MoveCost::load_s_per_byte, &MoveCost::held_up_share);
  for (const py::handle stage : stages)
    with_members(cost.stages.emplace_back(), [&](StageCost& to, auto... members) {
      read_members(to, py::reinterpret_borrow<py::tuple>(stage), members...);
    });
  return cost;
}

py::tuple tuple_of(const ChainCost& cost) {
  py::list stages;
  for (const StageCost& stage : cost.stages)
    stages.append(with_members(stage, [](const StageCost& from, auto... members) {
      return python::tuple_of(from, members...);
    }));
  py::object moving = py::none();
  if (cost.moving)
    moving = python::tuple_of(*cost.moving, &MoveCost::store_s_per_byte, &MoveCost::load_s_per_byte,
                              &MoveCost::held_up_share);
  return py::make_tuple(cost.input_bytes, cost.input_grad_bytes, stages, cost.rounding, moving,
                        cost.cached_cast_bytes, cost.held_to_end_bytes);
}

// ---- planning

/// A stage that is called without the interpreter's lock.
Stage stage_in(py::handle stage, std::size_t number, const char* verb) {
  return [kept = shared(stage), number, verb](at::Tensor x) {
    return call_locked([&] { return call_stage(kept.get(), number, std::move(x), verb); });
  };
}

py::tuple measure_stages(const py::list& stages, const at::Tensor& sample, int64_t warmup,
                         int64_t repeats, const py::object& device, bool early_stop,
                         const py::object& moving) {
  MeasureOptions options{
      .warmup = warmup, .repeats = repeats, .device = {}, .early_stop = early_stop};
  if (!device.is_none()) options.device = device_in(device);
  if (!moving.is_none()) options.moving = moving_in(moving);
  std::vector<Stage> all;
  for (const py::handle stage : stages) all.push_back(stage_in(stage, all.size() + 1, "measure"));
  // Each stage as a chain of its own, which is one region.
  const auto run_region = [&stages](std::size_t stage, const CheckpointOptions& region,
                                    at::Tensor input) {
    return call_locked([&] {
      py::list one;
      one.append(stages[stage]);
      const auto result = py::reinterpret_steal<py::object>(
          run_plan(Plan(1, {{1, 1}}), one, region, {}, std::move(input)));
      if (!result) throw python_error();
      return THPVariable_Unpack(result.ptr());
    });
  };
  ChainCost cost;
  {
    const Unlocked unlocked;
    cost = remat::measure_stages(all, sample, options, run_region);
  }
  return tuple_of(cost);
}

Plan plan_for(const Frontier& frontier, int64_t budget_bytes) {
  try {
    return frontier.plan(budget_bytes);
  } catch (const InfeasibleBudget& error) {
    static PyObject* const type = imported("remat._plan", "InfeasibleBudget");
    const py::object made = py::handle(type)(error.what_without_backtrace(), error.minimum_bytes());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
    throw py::error_already_set();
  }
}

/// Regions as (first, last).
Plan make_plan(const py::object& stages, const py::iterable& regions, std::vector<int64_t> moved) {
  checked("remat.Plan", "stages", "int", stages);
  std::vector<PlanRegion> all;
  for (const py::handle each : regions) {
    const py::tuple numbers(py::reinterpret_borrow<py::object>(each));
    if (numbers.size() != 2)
      throw py::value_error("remat.Plan: each region must be a pair (first, last), got " +
                            std::string(py::repr(each)) + ".");
    all.push_back({numbers[0].cast<int64_t>(), numbers[1].cast<int64_t>()});
  }
  return Plan(value_in<int64_t>(stages, "stages"), std::move(all), std::move(moved));
}

py::list regions_of(const Plan& plan) {
  static PyObject* const type = imported("remat._plan_region", "PlanRegion");
  py::list all;
  for (const PlanRegion& each : plan.regions()) all.append(py::handle(type)(each.first, each.last));
  return all;
}

void add_plan_class(py::module_& module) {
  py::class_<Plan>(
      module, "Plan",
      "Plan(stages, regions=[]): the regions of a chain of stages, as (first, last) pairs "
      "from 1,\n"
      "in the order in which they open. As text: '[ck[ck[1] 2] ck[3] 4 5]'.\n"
      "`moved`: the first stages of those stages and regions,\n"
      "outside of other regions, whose saved tensors wait elsewhere: '[1 mv[2] mv[ck[3 4]] 5]' "
      "as text. Not the\n"
      "last one. Immutable.")
      .def(py::init(wrapped(make_plan)), py::arg("stages"), py::arg("regions") = py::tuple(),
           py::arg("moved") = std::vector<int64_t>())
      .def_static("parse", wrapped([](const py::object& text) {
                    checked("remat.Plan.parse", "text", "str", text);
                    return Plan::parse(text.cast<std::string>());
                  }),
                  "Reads the text of `str`. Raises ValueError with the position for other texts.")
      .def("__str__", &Plan::to_string)
      .def("__repr__", [](const Plan& self) { return "Plan.parse('" + self.to_string() + "')"; })
      .def("__eq__",
           [](const Plan& self, const py::object& other) {
             return py::isinstance<Plan>(other) && self == other.cast<const Plan&>();
           })
      .def("__hash__", [](const Plan& self) { return py::hash(py::str(self.to_string())); })
      .def("__reduce__",
           [](const py::object& self) {
             return py::make_tuple(
                 py::type::of(self),
                 py::make_tuple(self.attr("stages"), self.attr("regions"), self.attr("moved")));
           })
      .def_property_readonly("stages", &Plan::stages, "The number of stages of the chain.")
      .def_property_readonly("depth", &Plan::depth, "The deepest nesting; 0 without regions.")
      .def_property_readonly("frames", &Plan::frames, "The number of regions.")
      .def_property_readonly("regions", regions_of,
                             "A PlanRegion for each, in the order in which they open.")
      .def_property_readonly("moved", &Plan::moved,
                             "The first stages of the moved stages and regions, in order.")
      .def("calls", &Plan::calls,
           "Returns the forward calls of each stage with one backward and early stop.");
}

}  // namespace

void add_plan(py::module_& module) {
  add_plan_class(module);
  py::class_<Frontier>(module, "_Frontier",
                       "The result of `solve`: the least time for every budget. Any thread.")
      .def_property_readonly("_points",
                             [](const Frontier& self) {
                               py::list all;
                               for (const FrontierPoint& each : self.points())
                                 all.append(py::make_tuple(each.bytes, each.extra_s));
                               return all;
                             })
      .def("plan", wrapped(plan_for), py::arg("budget_bytes"),
           "Returns the fastest plan of at most `budget_bytes` [bytes] beyond the input. Raises\n"
           "InfeasibleBudget below the first point.");
  const auto define = [&](const char* name, auto function) {
    module.def(name, wrapped(std::move(function)));
  };
  define("_solve", [](const py::tuple& cost, int64_t max_depth, bool early_stop,
                      double frame_cost_s, double eps) {
    const ChainCost chain = cost_in(cost);
    const Unlocked unlocked;
    return solve(chain, {.max_depth = max_depth,
                         .early_stop = early_stop,
                         .frame_cost_s = frame_cost_s,
                         .eps = eps});
  });
  define("_simulate",
         [](const py::tuple& cost, const Plan& plan, bool early_stop, double frame_cost_s) {
           const Simulation result = simulate(
               cost_in(cost), plan, {.early_stop = early_stop, .frame_cost_s = frame_cost_s});
           return py::make_tuple(result.peak_bytes, result.extra_s, result.calls, result.frames,
                                 result.depth);
         });
  define("_measure", measure_stages);
  define("_measure_peak", [](const py::object& chain, const at::Tensor& sample) {
    const Stage stage = stage_in(chain, 1, "fit");
    const Unlocked unlocked;
    return measure_peak(stage, sample);
  });
  define("_free_budget", [](const py::tuple& cost, const py::object& device, double margin) {
    return free_budget(cost_in(cost), device_in(device), margin);
  });
  define("_plan_by", [](const std::string& rule, int64_t stages, int64_t number) {
    static const std::map<std::string, Plan (*)(int64_t, int64_t)> rules{
        {"revolve", revolve_plan},
        {"mixed", mixed_plan},
        {"balanced", balanced_plan},
        {"torch_sequential", torch_sequential_plan},
        {"halving", [](int64_t all, int64_t) { return halving_plan(all); }}};
    return rules.at(rule)(stages, number);
  });
  define("_run", [](const Plan& plan, const py::list& stages, const at::Tensor& input,
                    const CheckpointOptions& options, const py::object& moving) {
    const auto result = py::reinterpret_steal<py::object>(
        run_plan(plan, stages, options, moving_in(moving), input));
    if (!result) throw py::error_already_set();
    return result;
  });
}

}  // namespace remat::python
