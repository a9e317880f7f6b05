// The planner, and chains of Python functions that run as a plan says.

#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "device.h"
#include "modules.h"
#include "policy.h"
#include "remat/binding.h"
#include "remat/fit.h"
#include "remat/options.h"
#include "remat/plan.h"
#include "stop.h"

namespace remat::python {

namespace {

[[noreturn]] void throw_python_error() { throw python_error(); }

/// Calls a stage with the lock held. Nothing of the tensor stays behind; the caller's own is moved
/// on.
at::Tensor call_stage(PyObject* stage, std::size_t number, at::Tensor x, const char* verb) {
  PyObject* const argument = THPVariable_Wrap(std::move(x));
  if (argument == nullptr) throw_python_error();
  PyObject* const result = in_python([&] { return PyObject_CallOneArg(stage, argument); });
  Py_DECREF(argument);
  if (result == nullptr) throw_python_error();
  const auto owned = py::reinterpret_steal<py::object>(result);
  const at::Tensor* const tensor = tensor_in(result);
  if (tensor == nullptr) {
    PyErr_Format(PyExc_TypeError, "remat.%s: stage %zu returned %R, and must return one tensor.",
                 verb, number, reinterpret_cast<PyObject*>(Py_TYPE(result)));
    throw_python_error();
  }
  return *tensor;
}

// ---- running

/// A plan with its stages. The graph keeps it, so nothing in it is the cyclic collector's.
struct Program {
  struct Region {
    std::vector<int64_t> items;  // stages from 1, regions as negative numbers
    CheckpointOptions options;
    std::vector<PyObject*> modules;  // of its stages; borrowed from those
  };
  std::vector<PyObject*> stages;
  std::vector<PyObject*> modules;  // of each stage, or null; borrowed
  std::vector<Region> regions;     // the first is the whole chain

  Program() = default;
  ~Program() { drop(stages.data(), stages.size()); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
};

at::Tensor run_region(const std::shared_ptr<const Program>& program, std::size_t region,
                      at::Tensor x);

at::Tensor run_item(const std::shared_ptr<const Program>& program, std::size_t region, int64_t item,
                    at::Tensor x) {
  if (item < 0) return run_region(program, static_cast<std::size_t>(-item), std::move(x));
  const auto stage = static_cast<std::size_t>(item - 1);
  std::optional<ModulesWatched>
      watched;  // a stage of no region of the plan, in one of the program's
  if (region == 0 && program->modules[stage] != nullptr)
    watched.emplace(std::vector{program->modules[stage]});
  return call_stage(program->stages[stage], stage + 1, std::move(x), "run");
}

// Each tensor is moved on: whoever still held the input of a region that has begun would keep what
// its plan counts as gone.
at::Tensor run_items(const std::shared_ptr<const Program>& program, std::size_t region,
                     at::Tensor x) {
  for (const int64_t item : program->regions[region].items)
    x = run_item(program, region, item, std::move(x));
  return x;
}

// The interpreter's lock is let go of between the items: what moves is waited for there, and freed
// on the thread that writes it, where a storage of NumPy's needs the lock.
at::Tensor run_planned(const std::shared_ptr<const Program>& program, const Plan& plan,
                       const MoveOptions& moving, at::Tensor input) {
  if (plan.moved().empty()) return run_items(program, 0, std::move(input));
  const Unlocked unlocked;
  const auto run_outermost = [&program](std::size_t item, at::Tensor x) {
    const Locked locked(Locked::AtEnd::Wait);
    try {
      return run_item(program, 0, program->regions[0].items[item], std::move(x));
    } catch (...) {
      set_error_in_flight();
    }
    throw_persisted();
  };
  return remat::run_items(plan, std::move(input), moving, run_outermost);
}

/// The stages of a region, as its body.
class StagesBody final : public RegionBody {
 public:
  StagesBody(std::shared_ptr<const Program> program, std::size_t region, at::Tensor input,
             std::unique_ptr<ModuleState> modules)
      : program_(std::move(program)),
        region_(region),
        input_(std::move(input)),
        modules_(std::move(modules)) {}

  void visit_inputs(TensorVisitor visitor) override { visitor(input_); }
  bool can_be_stopped() const override { return true; }

  void run_again(std::vector<at::Tensor>& inputs) override {
    const Locked locked(Locked::AtEnd::Wait);
    Rerun rerun(this);
    try {
      const WithoutCompiler uncompiled;
      std::optional<ModuleState::Hold> hold;
      if (modules_ != nullptr) hold.emplace(*modules_);
      run_items(program_, region_, std::move(inputs[0]));
      return;
    } catch (...) {
      set_error_in_flight();
    }
    if (!rerun.take_stop()) throw_persisted();
  }

  [[noreturn]] void stop() override { Rerun::stop(); }
  bool stop_soon() override { return Rerun::stop_soon(this); }
  bool stop_at_region() override { return Rerun::set_stop(), true; }

  [[noreturn]] void raise(CheckpointError error) override {
    const Locked locked(Locked::AtEnd::Wait);
    set_error(error);
    throw_persisted();
  }

  const TensorNames* tensor_names() const override { return modules_.get(); }

 private:
  const std::shared_ptr<const Program> program_;
  const std::size_t region_;
  at::Tensor input_;
  const std::unique_ptr<ModuleState> modules_;
};

at::Tensor run_region(const std::shared_ptr<const Program>& program, std::size_t region,
                      at::Tensor x) {
  const Program::Region& planned = program->regions[region];
  if (!opens_region(planned.options)) return run_items(program, region, std::move(x));
  std::unique_ptr<ModuleState> modules;
  if (!planned.modules.empty()) {
    modules = std::make_unique<ModuleState>(planned.modules);
    modules->note_members();
  }
  ModuleState* const state = modules.get();
  const CheckpointOptions options =
      modules != nullptr ? with_modules(planned.options, *modules) : planned.options;
  ForwardRun run(options, std::make_unique<StagesBody>(program, region, x, std::move(modules)));
  at::Tensor result = run_items(program, region, std::move(x));
  if (state != nullptr) state->settle();
  run.finish([&](TensorVisitor visitor) {
    at::Tensor visited = result;
    visitor(visited);
  });
  return result;
}

std::string name_of(const std::string& name, const PlanRegion& region) {
  const std::string stages =
      region.first == region.last
          ? "stage " + std::to_string(region.first)
          : "stages " + std::to_string(region.first) + " to " + std::to_string(region.last);
  return name.empty() ? stages : name + ", " + stages;
}

std::shared_ptr<const Program> program_of(const Plan& plan, const py::list& stages,
                                          const CheckpointOptions& options) {
  if (static_cast<int64_t>(stages.size()) != plan.stages())
    throw py::value_error("remat.run: the plan has " + std::to_string(plan.stages()) +
                          " stages, but " + std::to_string(stages.size()) +
                          " functions were passed.");
  auto program = std::make_shared<Program>();
  std::vector<PyObject*>& modules = program->modules;
  for (const py::handle stage : stages) {
    if (PyCallable_Check(stage.ptr()) == 0)
      throw py::type_error("remat.run: a stage must be a function or a module.");
    program->stages.push_back(stage.inc_ref().ptr());
    modules.push_back(module_in(stage.ptr()));
  }
  // Regions in the order in which they open, each with its end; the innermost that is open gets the
  // stage.
  struct Open {
    std::size_t region;
    int64_t last;
  };
  program->regions.push_back({{}, options, {}});
  std::vector<Open> open{{0, plan.stages()}};
  auto next = plan.regions().begin();
  for (int64_t stage = 1; stage <= plan.stages(); ++stage) {
    for (; next != plan.regions().end() && next->first == stage; ++next) {
      const std::size_t region = program->regions.size();
      program->regions[open.back().region].items.push_back(-static_cast<int64_t>(region));
      program->regions.push_back({{}, options, {}});
      program->regions.back().options.name = name_of(options.name, *next);
      for (int64_t inside = next->first; inside <= next->last; ++inside)
        if (PyObject* const module = modules[static_cast<std::size_t>(inside - 1)])
          program->regions.back().modules.push_back(module);
      open.push_back({region, next->last});
    }
    program->regions[open.back().region].items.push_back(stage);
    while (open.size() > 1 && open.back().last == stage) open.pop_back();
  }
  return program;
}

/// Runs a plan on a tensor: a new reference, or null with a Python error set.
PyObject* run(const std::shared_ptr<const Program>& program, const Plan& plan,
              const MoveOptions& moving, at::Tensor input) {
  try {
    torch::PyWarningHandler warnings;
    try {
      const WithoutCompiler uncompiled;
      return THPVariable_Wrap(run_planned(program, plan, moving, std::move(input)));
    } catch (...) {
      warnings.set_in_exception();
      set_error_in_flight();
      return nullptr;
    }
  } catch (...) {
    set_error_in_flight();
    return nullptr;
  }
}

// ---- planning

using StageTuple =
    std::tuple<double, double, double, int64_t, int64_t, int64_t, int64_t, int64_t, bool, int64_t,
               int64_t, bool, int64_t, int64_t, bool, int64_t, int64_t, int64_t>;
using MoveCostTuple = std::tuple<double, double, double>;
using CostTuple = std::tuple<int64_t, int64_t, std::vector<StageTuple>, double,
                             std::optional<MoveCostTuple>, int64_t, int64_t>;
using MoveTuple = std::tuple<std::string, int64_t, bool>;

MoveOptions moving_in(const MoveTuple& moving) {
  const auto& [directory, min_bytes, pin_memory] = moving;
  return {.directory = directory, .min_bytes = min_bytes, .pin_memory = pin_memory};
}

ChainCost cost_in(const CostTuple& cost) {
  ChainCost chain{std::get<0>(cost), std::get<1>(cost), {}, std::get<3>(cost)};
  chain.cached_cast_bytes = std::get<5>(cost);
  chain.held_to_end_bytes = std::get<6>(cost);
  if (const auto& moving = std::get<4>(cost))
    chain.moving = {std::get<0>(*moving), std::get<1>(*moving), std::get<2>(*moving)};
  for (const auto& [forward_s, backward_s, to_last_save_s, output, saved, forward_tmp, backward_tmp,
                    grad, saves_output, unsaved_tmp, movable, has_movable_output, first_read_tmp,
                    stopped_tmp, saves_input, backward, region_backward, lone_backward] :
       std::get<2>(cost)) {
    chain.stages.push_back({forward_s, backward_s, to_last_save_s, output, saved, forward_tmp,
                            backward_tmp, grad, saves_output, unsaved_tmp, movable,
                            has_movable_output});
    StageCost& stage = chain.stages.back();
    stage.first_read_tmp_bytes = first_read_tmp;
    stage.stopped_tmp_bytes = stopped_tmp;
    stage.saves_input = saves_input;
    stage.backward_bytes = backward;
    stage.region_backward_bytes = region_backward;
    stage.lone_backward_bytes = lone_backward;
  }
  return chain;
}

CostTuple tuple_of(const ChainCost& chain) {
  CostTuple cost{chain.input_bytes,       chain.input_grad_bytes, {}, chain.rounding, {},
                 chain.cached_cast_bytes, chain.held_to_end_bytes};
  if (chain.moving)
    std::get<4>(cost).emplace(chain.moving->store_s_per_byte, chain.moving->load_s_per_byte,
                              chain.moving->held_up_share);
  for (const StageCost& each : chain.stages) {
    std::get<2>(cost).emplace_back(
        each.forward_s, each.backward_s, each.forward_to_last_save_s, each.output_bytes,
        each.saved_bytes, each.forward_tmp_bytes, each.backward_tmp_bytes, each.grad_bytes,
        each.saves_output, each.unsaved_tmp_bytes, each.movable_bytes, each.has_movable_output,
        each.first_read_tmp_bytes, each.stopped_tmp_bytes, each.saves_input, each.backward_bytes,
        each.region_backward_bytes, each.lone_backward_bytes);
  }
  return cost;
}

/// A stage that is called without the interpreter's lock.
Stage stage_in(py::handle stage, std::size_t number, const char* verb) {
  const std::shared_ptr<PyObject> kept(stage.inc_ref().ptr(),
                                       [](PyObject* last) { drop(&last, 1); });
  return [kept, number, verb](at::Tensor x) {
    const Locked locked(Locked::AtEnd::Wait);
    try {
      return call_stage(kept.get(), number, std::move(x), verb);
    } catch (python_error&) {
      throw_persisted();
    }
  };
}

CostTuple measure_stages(const py::list& stages, const at::Tensor& sample, int64_t warmup,
                         int64_t repeats, const py::object& device, bool early_stop,
                         const std::optional<MoveTuple>& moving) {
  MeasureOptions options{
      .warmup = warmup, .repeats = repeats, .device = {}, .early_stop = early_stop};
  if (!device.is_none()) options.device = device_in(device);
  if (moving) options.moving = moving_in(*moving);
  std::vector<Stage> all;
  for (const py::handle stage : stages) all.push_back(stage_in(stage, all.size() + 1, "measure"));
  // Each stage as a chain of its own, which is one region.
  const auto run_region = [&stages](std::size_t stage, const CheckpointOptions& region,
                                    at::Tensor input) {
    const Locked locked(Locked::AtEnd::Wait);
    PyObject* result = nullptr;
    try {
      py::list one;
      one.append(stages[stage]);
      const Plan plan(1, {{1, 1}});
      result = run(program_of(plan, one, region), plan, {}, std::move(input));
    } catch (...) {
      set_error_in_flight();
    }
    if (result == nullptr) throw_persisted();
    const auto owned = py::reinterpret_steal<py::object>(result);
    return THPVariable_Unpack(result);
  };
  return with_package_errors([&] {
    const Unlocked unlocked;
    return tuple_of(remat::measure_stages(all, sample, options, run_region));
  });
}

Plan plan_for(const Frontier& frontier, int64_t budget_bytes) {
  try {
    return frontier.plan(budget_bytes);
  } catch (const InfeasibleBudget& error) {
    const py::object made =
        py::module_::import("remat._plan")
            .attr("InfeasibleBudget")(error.what_without_backtrace(), error.minimum_bytes());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
    throw py::error_already_set();
  }
}

/// Regions as (first, last).
Plan make_plan(int64_t stages, const py::iterable& regions, std::vector<int64_t> moved) {
  std::vector<PlanRegion> all;
  for (const py::handle each : regions) {
    const py::tuple numbers(py::reinterpret_borrow<py::object>(each));
    if (numbers.size() != 2)
      throw py::value_error("remat.Plan: a region is (first, last), and one is " +
                            std::string(py::repr(each)) + ".");
    all.push_back({numbers[0].cast<int64_t>(), numbers[1].cast<int64_t>()});
  }
  return Plan(stages, std::move(all), std::move(moved));
}

py::list regions_of(const Plan& plan) {
  static PyObject* const type =
      py::object(py::module_::import("remat._plan").attr("PlanRegion")).release().ptr();
  py::list all;
  for (const PlanRegion& each : plan.regions()) all.append(py::handle(type)(each.first, each.last));
  return all;
}

}  // namespace

void add_plan(py::module_& module) {
  const auto define = [&](const char* name, auto function) {
    module.def(name, torch::wrap_pybind_function(std::move(function)));
  };
  py::class_<Plan>(
      module, "Plan",
      "Plan(stages, regions=[]): which stages of a chain are regions, as (first, last) pairs from 1,\n"
      "in the order in which they open. As text: '[ck[ck[1] 2] ck[3] 4 5]'.\n"
      " `moved`: the first stages of those stages and regions,\n"
      "outside of other regions, whose saved tensors wait elsewhere: '[1 mv[2] mv[ck[3 4]] 5]' as text. Not the\n"
      "last one. Immutable.")
      .def(py::init(torch::wrap_pybind_function(make_plan)), py::arg("stages"),
           py::arg("regions") = py::tuple(), py::arg("moved") = std::vector<int64_t>())
      .def_static("parse", torch::wrap_pybind_function([](const std::string& text) {
                    return Plan::parse(text);
                  }),
                  "Reads what `str` writes. Raises ValueError with the position for anything else.")
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
      .def_property_readonly("stages", &Plan::stages, "Of the chain.")
      .def_property_readonly("depth", &Plan::depth, "The deepest nesting; 0 without regions.")
      .def_property_readonly("frames", &Plan::frames, "The number of regions.")
      .def_property_readonly("regions", regions_of,
                             "A PlanRegion for each, in the order in which they open.")
      .def_property_readonly("moved", &Plan::moved,
                             "The first stages of what moves what it saves, in order.")
      .def("calls", &Plan::calls,
           "How often forward, with one backward and early stop, calls each stage.");

  py::class_<Frontier>(module, "Frontier",
                       "What `solve` found: the least time for every budget. Any thread.")
      .def_property_readonly("_points",
                             [](const Frontier& self) {
                               std::vector<std::pair<int64_t, double>> all;
                               for (const FrontierPoint& each : self.points())
                                 all.emplace_back(each.bytes, each.extra_s);
                               return all;
                             })
      .def(
          "plan", torch::wrap_pybind_function(plan_for), py::arg("budget_bytes"),
          "The fastest plan whose peak is at most `budget_bytes` [bytes] beyond the input. Raises\n"
          "InfeasibleBudget below the first point.");

  define("_solve", [](const CostTuple& cost, int64_t max_depth, bool early_stop,
                      double frame_cost_s, double eps) {
    const Unlocked unlocked;
    return solve(cost_in(cost), {.max_depth = max_depth,
                                 .early_stop = early_stop,
                                 .frame_cost_s = frame_cost_s,
                                 .eps = eps});
  });
  define("_simulate",
         [](const CostTuple& cost, const Plan& plan, bool early_stop, double frame_cost_s) {
           const Simulation result = simulate(
               cost_in(cost), plan, {.early_stop = early_stop, .frame_cost_s = frame_cost_s});
           return std::make_tuple(result.peak_bytes, result.extra_s, result.calls, result.frames,
                                  result.depth);
         });
  define("_measure", measure_stages);
  define("_measure_peak", [](const py::object& chain, const at::Tensor& sample) {
    const Stage stage = stage_in(chain, 1, "fit");
    return with_package_errors([&] {
      const Unlocked unlocked;
      return measure_peak(stage, sample);
    });
  });
  define("_free_budget", [](const CostTuple& cost, const py::object& device, double margin) {
    const c10::Device asked = device_in(device);
    return with_package_errors([&] { return free_budget(cost_in(cost), asked, margin); });
  });
  define("revolve_plan",
         [](int64_t stages, int64_t snapshots) { return revolve_plan(stages, snapshots); });
  define("mixed_plan", [](int64_t stages, int64_t units) { return mixed_plan(stages, units); });
  define("balanced_plan",
         [](int64_t stages, int64_t segments) { return balanced_plan(stages, segments); });
  define("torch_sequential_plan",
         [](int64_t stages, int64_t segments) { return torch_sequential_plan(stages, segments); });
  define("halving_plan", [](int64_t stages) { return halving_plan(stages); });

  define("_run", [](const Plan& plan, const py::list& stages, const at::Tensor& input,
                    const CheckpointOptions& options, const MoveTuple& moving) {
    PyObject* const result = run(program_of(plan, stages, options), plan, moving_in(moving), input);
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
  });
}

}  // namespace remat::python
