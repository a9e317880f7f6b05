// Chains of Python functions that run as a plan says.

#include "plan_runs.h"

#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "modules.h"
#include "region.h"
#include "remat/binding.h"
#include "stop.h"

namespace remat::python {

at::Tensor call_stage(PyObject* stage, std::size_t number, at::Tensor x, const char* verb) {
  PyObject* const argument = THPVariable_Wrap(std::move(x));
  if (argument == nullptr) throw python_error();
  PyObject* const result = in_python([&] { return PyObject_CallOneArg(stage, argument); });
  Py_DECREF(argument);
  if (result == nullptr) throw python_error();
  const auto owned = py::reinterpret_steal<py::object>(result);
  const at::Tensor* const tensor = tensor_in(result);
  if (tensor == nullptr) {
    PyErr_Format(PyExc_TypeError, "remat.%s: stage %zu must return one tensor, got %R.", verb,
                 number, reinterpret_cast<PyObject*>(Py_TYPE(result)));
    throw python_error();
  }
  return *tensor;
}

namespace {

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

// Each tensor is moved on: another owner of a begun region's input would keep memory that the plan
// counts as free.
at::Tensor run_items(const std::shared_ptr<const Program>& program, std::size_t region,
                     at::Tensor x) {
  for (const int64_t item : program->regions[region].items)
    x = run_item(program, region, item, std::move(x));
  return x;
}

// The interpreter's lock is released between the items: moves wait there, and tensors are freed on
// the thread that writes them, where a storage of NumPy needs the lock.
at::Tensor run_planned(const std::shared_ptr<const Program>& program, const Plan& plan,
                       const MoveOptions& moving, at::Tensor input) {
  if (plan.moved().empty()) return run_items(program, 0, std::move(input));
  const Unlocked unlocked;
  const auto run_outermost = [&program](std::size_t item, at::Tensor x) {
    return call_locked(
        [&] { return run_item(program, 0, program->regions[0].items[item], std::move(x)); });
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

}  // namespace

PyObject* run_plan(const Plan& plan, const py::list& stages, const CheckpointOptions& options,
                   const MoveOptions& moving, at::Tensor input) {
  return guarded([&] {
    const auto program = program_of(plan, stages, options);
    const WithoutCompiler uncompiled;
    return THPVariable_Wrap(run_planned(program, plan, moving, std::move(input)));
  });
}

}  // namespace remat::python
