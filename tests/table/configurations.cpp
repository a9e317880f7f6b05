// The configurations: the ways in which a body runs in regions.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <atomic>
#include <optional>
#include <random>
#include <thread>

#include "remat/budget.h"
#include "remat/budget_trial.h"
#include "remat/checkpoint.h"
#include "remat/hooks.h"
#include "remat/report.h"
#include "remat/scope.h"
#include "remat/state.h"
#include "tests/table/surroundings.h"
#include "tests/table/table.h"

namespace table {

Tensors plain_region(const Body& body, const Tensors& args) {
  return remat::checkpoint(body, args);
}

Tensors each_float(Tensors tensors, const std::function<Tensor(const Tensor&)>& f) {
  for (Tensor& t : tensors)
    if (t.defined() && t.layout() == at::kStrided && (t.is_floating_point() || t.is_complex()))
      t = f(t);
  return tensors;
}

namespace {

using remat::CheckpointOptions;
using remat::CheckpointPolicy;
using remat::DeterminismCheck;

Tensors region(const CheckpointOptions& options, const Body& body, const Tensors& args) {
  return remat::checkpoint(options, body, args);
}

Runner with(CheckpointOptions options) {
  return [options = std::move(options)](const Body& body, const Tensors& args) {
    return region(options, body, args);
  };
}

/// Returns a runner whose forward runs under a guard.
template <class MakeGuard>
Runner under(MakeGuard make_guard, Runner runner = plain_region) {
  return [make_guard, runner = std::move(runner)](const Body& body, const Tensors& args) {
    const auto guard = make_guard();
    return runner(body, args);
  };
}

/// Returns a runner whose body runs under a guard in both passes.
template <class MakeGuard>
Runner inside(MakeGuard make_guard, Runner runner = plain_region) {
  return [make_guard, runner = std::move(runner)](const Body& body, const Tensors& args) {
    return runner(
        [make_guard, body](const Tensors& given) {
          const auto guard = make_guard();
          return body(given);
        },
        args);
  };
}

/// Operators behind the body, for regions that hold more than the body.
Tensors sines(const Tensors& tensors) {
  return each_float(tensors, [](const Tensor& t) { return t.sin(); });
}
Tensors body_then_sines(const Body& body, const Tensors& args) { return sines(body(args)); }
Tensors body_then_two_sines(const Body& body, const Tensors& args) {
  return sines(sines(body(args)));
}

Body named_results(const Body& body) {
  return [body](const Tensors& args) {
    return sines(each_float(body(args),
                            [](const Tensor& t) { return remat::checkpoint_name(t, "result"); }));
  };
}

/// Returns a region whose policy is asked about names, around the body and the operators behind it.
Runner with_names(remat::Policy policy) {
  return [policy = std::move(policy)](const Body& body, const Tensors& args) {
    return region({.policy = policy}, named_results(body), args);
  };
}

Tensors half_captured(const Body& body, const Tensors& args) {
  Tensors passed, captured;
  for (std::size_t i = 0; i < args.size(); ++i) (i % 2 == 0 ? passed : captured).push_back(args[i]);
  return remat::checkpoint(
      [body, captured](const Tensors& given) {
        Tensors all;
        for (std::size_t i = 0; i < given.size() + captured.size(); ++i)
          all.push_back(i % 2 == 0 ? given[i / 2] : captured[i / 2]);
        return body(all);
      },
      passed);
}

Tensors with_prelude(const Runner& runner, const Body& body, const Tensors& args) {
  return runner(body, each_float(args, [](const Tensor& t) { return t * 1; }));
}

/// Returns a runner that multiplies results by a number from the program's own engine.
Runner with_engine(Runner runner) {
  return [runner = std::move(runner)](const Body& body, const Tensors& args) {
    const auto engine = std::make_shared<Engine>();
    const remat::StateProviderGuard guard(engine);
    return runner(
        [engine, body](const Tensors& given) {
          const double factor = engine->next();
          return each_float(body(given), [factor](const Tensor& t) { return t * factor; });
        },
        args);
  };
}

/// Returns a runner that multiplies results by numbers of the program's own generator.
Runner with_generator(Runner runner) {
  return [runner = std::move(runner)](const Body& body, const Tensors& args) {
    const at::Generator generator = at::detail::createCPUGenerator(17);
    const remat::GeneratorGuard guard(generator);
    return runner(
        [generator, body](const Tensors& given) {
          return each_float(body(given), [&generator](const Tensor& t) {
            return t * at::rand({}, generator, at::kDouble);
          });
        },
        args);
  };
}

Runner run_body() {
  return [](const Body& body, const Tensors& args) { return body(args); };
}

CheckpointPolicy keep_all(const remat::PolicyContext&) { return CheckpointPolicy::MustSave; }

/// Answers by the operator's name, and so alike in each call.
CheckpointPolicy by_name(const remat::PolicyContext& call) {
  return call.op_name.size() % 2 == 0 ? CheckpointPolicy::MustSave
                                      : CheckpointPolicy::PreferRecompute;
}

remat::PolicyFn alternating() {
  return [calls = std::make_shared<std::atomic<int>>(0)](const remat::PolicyContext&) {
    return ++*calls % 2 == 0 ? CheckpointPolicy::MustSave : CheckpointPolicy::MustRecompute;
  };
}

std::vector<std::string> common_operators() {
  return {"aten::mm",          "aten::addmm",        "aten::bmm",
          "aten::sin",         "aten::exp",          "aten::mul",
          "aten::bernoulli.p", "aten::cat",          "aten::native_dropout",
          "aten::sum",         "aten::_log_softmax", "aten::div",
          "aten::index.Tensor"};
}

std::shared_ptr<void> counted_scope(std::atomic<int>& alive) {
  ++alive;
  return {&alive, [](std::atomic<int>* count) { --*count; }};
}

/// Runs with scopes of a region's passes, which must be alive only in the body.
Tensors with_scopes(const Body& body, const Tensors& args) {
  const auto alive = std::make_shared<std::atomic<int>>(0);
  auto enter = [alive] { return counted_scope(*alive); };
  const Tensors results = region(
      {.context_fn = [enter] { return remat::ContextPair{enter, enter}; }},
      [alive, body](const Tensors& given) {
        if (*alive == 0) report_fault("the scope of a pass is not alive in it");
        return body(given);
      },
      args);
  if (*alive != 0) report_fault("the scope of a pass outlives it");
  return results;
}

/// Counts begins and ends of recomputes, which must come in pairs.
struct Observed {
  ~Observed() {
    if (begun != ended) report_fault("an observer is not told of the end of each recompute");
  }
  std::atomic<int> begun{0}, ended{0};
};

Tensors observed(const Body& body, const Tensors& args) {
  const auto seen = std::make_shared<Observed>();
  const remat::RecomputeObserverGuard guard(
      {.begin = [seen](const remat::PhaseInfo&) { ++seen->begun; },
       .end = [seen](const remat::PhaseInfo&) { ++seen->ended; }});
  return plain_region(body, args);
}

/// Returns a runner with forward on a thread of its own, plainly, too: a node's number depends on
/// its thread.
Runner on_thread(Runner runner) {
  return [runner = std::move(runner)](const Body& body, const Tensors& args) {
    Tensors results;
    std::exception_ptr error;
    std::thread([&] {
      try {
        results = runner(body, args);
      } catch (...) {
        error = std::current_exception();
      }
    }).join();
    if (error) std::rethrow_exception(error);
    return results;
  };
}

Runner nested(int depth) {
  if (depth == 1) return plain_region;
  return [inner = nested(depth - 1)](const Body& body, const Tensors& args) {
    return plain_region([inner, body](const Tensors& given) { return inner(body, given); }, args);
  };
}

template <class Guard, class... Options>
std::function<std::shared_ptr<void>(uint64_t)> alive(Options... options) {
  return [options...](uint64_t) { return std::make_shared<Guard>(options...); };
}

/// A byte budget around forward and backward, with a size from the seed.
class RandomBudget {
 public:
  RandomBudget(remat::budget::Choice choice, uint64_t seed) {
    std::mt19937_64 engine(seed);
    remat::budget::set_choice(choice, engine());
    const uint64_t bytes = uint64_t{1} << engine() % 14;
    guard_.emplace(remat::BudgetOptions{.bytes = static_cast<int64_t>(bytes + engine() % bytes),
                                        .min_bytes = 0});
  }
  ~RandomBudget() {
    guard_.reset();
    remat::budget::set_choice(remat::budget::Choice::Reverse);
  }

 private:
  std::optional<remat::BudgetGuard> guard_;
};

/// Returns a configuration of the body by itself within a budget.
Configuration within_budget(std::string name, remat::budget::Choice choice) {
  Configuration row{std::move(name), run_body()};
  row.during = [choice](uint64_t seed) { return std::make_shared<RandomBudget>(choice, seed); };
  row.leaves_frames = true;
  return row;
}

void add_options(std::vector<Configuration>& all) {
  all.push_back({"region", plain_region});
  all.push_back({"named", with({.name = "the region"})});
  all.push_back({"early_stop_off", with({.early_stop = false})});
  all.push_back({"check_none", with({.determinism_check = DeterminismCheck::None})});
  all.push_back({"check_layout", with({.determinism_check = DeterminismCheck::Layout})});
  all.push_back({"check_values", with({.determinism_check = DeterminismCheck::Values})});
  all.push_back({"fingerprint", with({.fingerprint = [](const Tensor& t) {
                   return std::to_string(t.numel()) + c10::toString(t.scalar_type());
                 }})});
  all.push_back({"debug", with({.debug = true})});
  all.push_back({"rng_off", with({.preserve_rng_state = false})});
  all.push_back({"capture_ignore", with({.capture_check = remat::CaptureCheck::Ignore})});
  all.push_back({"strict_unpack", with({.strict_unpack = true})});
  all.push_back({"offload_inputs", with({.offload_inputs = true})});
  all.push_back({"inputs_copied", with({.inputs = remat::InputMode::CopyOnWrite})});
  all.push_back({"context_fn", with_scopes});
  all.push_back({"checkpointed_form", [](const Body& body, const Tensors& args) {
                   return remat::checkpointed(body, {.name = "form"})(args);
                 }});
}

void add_shapes(std::vector<Configuration>& all) {
  all.push_back({"captured", [](const Body& body, const Tensors& args) {
                   return remat::checkpoint([body, args] { return body(args); });
                 }});
  all.push_back({"half_captured", half_captured});
  all.push_back(
      {"after_operator",
       [](const Body& body, const Tensors& args) { return with_prelude(plain_region, body, args); },
       [](const Body& body, const Tensors& args) { return with_prelude(run_body(), body, args); },
       "prelude"});
  all.push_back({"nested_2", nested(2)});
  all.push_back({"nested_3", nested(3)});
  all.push_back({"nested_second_half",
                 [](const Body& body, const Tensors& args) {
                   return plain_region(
                       [body](const Tensors& given) { return plain_region(sines, body(given)); },
                       args);
                 },
                 body_then_sines, "sines"});
  all.push_back({"nested_first_half",
                 [](const Body& body, const Tensors& args) {
                   return plain_region(
                       [body](const Tensors& given) { return sines(plain_region(body, given)); },
                       args);
                 },
                 body_then_sines, "sines"});
  all.push_back({"in_sequence",
                 [](const Body& body, const Tensors& args) {
                   return plain_region(sines, plain_region(body, args));
                 },
                 body_then_sines, "sines"});
  all.push_back({"on_thread", on_thread(plain_region), on_thread(run_body()), "thread"});
  all.push_back({"disabled", under([] { return remat::DisableCheckpointGuard(); })});
  all.back().opens_frames = false;
}

void add_policies(std::vector<Configuration>& all) {
  const auto mutable_results = remat::SelectiveOptions{.allow_cache_entry_mutation = true};
  all.push_back({"policy_everything", with({.policy = remat::Policy(keep_all)})});
  all.push_back({"policy_everything_mutable", with({.policy = {keep_all, mutable_results}})});
  all.push_back({"policy_ops", with({.policy = remat::save_ops(common_operators())})});
  all.push_back({"policy_offload", with({.policy = remat::offload_ops(common_operators())})});
  all.push_back({"policy_alternating", [](const Body& body, const Tensors& args) {
                   return region({.policy = {alternating(), {}}}, body, args);
                 }});
  all.push_back({"policy_matmuls", with({.policy = remat::save_matmuls()})});
  all.push_back({"policy_ask_again", with({.policy = {by_name, {.ask_again = true}}})});
  all.push_back({"policy_hooks", under(hooks_that_clone,
                                       with({.policy = {by_name, {.save_through_hooks = true}}}))});
  all.push_back({"policy_nested", [](const Body& body, const Tensors& args) {
                   const Runner inner = with({.policy = {by_name, {}}});
                   return plain_region([inner, body](const Tensors& g) { return inner(body, g); },
                                       args);
                 }});
  all.push_back(
      {"policy_names", with_names(remat::save_names({"result"})), body_then_sines, "sines"});
  all.push_back({"policy_all_but_names", with_names(remat::save_all_but_names({"result"})),
                 body_then_sines, "sines"});
  all.push_back({"policy_names_or_ops",
                 with_names(remat::offload_names({"result"}) | remat::save_matmuls()),
                 body_then_sines, "sines"});
  all.push_back({"policy_pin",
                 [](const Body& body, const Tensors& args) {
                   return plain_region(
                       [body](const Tensors& given) {
                         return sines(each_float(sines(body(given)),
                                                 [](const Tensor& t) { return remat::pin(t); }));
                       },
                       args);
                 },
                 body_then_two_sines, "two sines"});
  all.push_back(
      {"policy_save_region",
       [](const Body& body, const Tensors& args) {
         return plain_region(
             [body](const Tensors& given) { return sines(remat::save_region(body, given)); }, args);
       },
       body_then_sines, "sines"});
}

void add_guards(std::vector<Configuration>& all) {
  all.push_back({"hooks_clone", under(hooks_that_clone)});
  all.push_back({"hooks_identity", under(hooks_that_keep)});
  all.push_back({"hooks_bytes", under(hooks_to_bytes)});
  all.push_back({"hooks_inside", inside(hooks_that_clone)});
  all.push_back({"save_on_cpu", under([] { return remat::SaveOnCpuGuard(); })});
  all.push_back({"save_on_disk", under(save_on_disk)});
  all.push_back({"save_on_disk_inside", inside(save_on_disk)});
  all.push_back({"save_as_float", under([] { return remat::SaveAsGuard(at::kFloat); })});
  all.push_back({"recompute_cache", plain_region, {}, "", alive<remat::RecomputeCacheGuard>()});
  all.push_back({"recompute_cache_tiny",
                 plain_region,
                 {},
                 "",
                 alive<remat::RecomputeCacheGuard>(remat::RecomputeCacheOptions{.max_bytes = 50})});
  all.push_back({"exec_group", plain_region, {}, "", alive<remat::GraphExecGroup>()});
  all.push_back({"recorder",
                 plain_region,
                 {},
                 "",
                 alive<remat::Recorder>(remat::RecorderOptions{.operators = true})});
  all.push_back({"autocast_around", under([] { return std::make_unique<Autocast>(); }),
                 under([] { return std::make_unique<Autocast>(); }, run_body()), "autocast"});
  all.push_back({"autocast_inside", inside([] { return std::make_unique<Autocast>(); }),
                 under([] { return std::make_unique<Autocast>(); }, run_body()), "autocast"});
  all.push_back({"state_provider", with_engine(plain_region), with_engine(run_body()), "engine"});
  all.push_back(
      {"generator_guard", with_generator(plain_region), with_generator(run_body()), "generator"});
  all.push_back({"observer", observed});
  all.push_back(within_budget("budget", remat::budget::Choice::Reverse));
  all.push_back(within_budget("budget_drops_any", remat::budget::Choice::Random));
}

}  // namespace

const std::vector<Configuration>& configurations() {
  static const std::vector<Configuration> all = [] {
    std::vector<Configuration> rows;
    add_options(rows);
    add_shapes(rows);
    add_policies(rows);
    add_guards(rows);
    return rows;
  }();
  return all;
}

}  // namespace table
