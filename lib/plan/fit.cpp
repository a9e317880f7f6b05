// A chain and a byte budget: measured, planned, checked and run.

#include "remat/fit.h"

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "lib/base/error.h"
#include "lib/base/waiting.h"
#include "lib/plan/cost.h"
#include "lib/plan/frontier_picture.h"
#include "lib/plan/measurements.h"

namespace remat {

namespace {

/// The costs, the frontier and the plan for one kind of input.
struct Fit {
  ChainCost cost;
  bool was_measured;
  Frontier frontier;
  Plan plan;
  std::optional<int64_t> measured_peak;
};

double step_seconds(const ChainCost& cost) {
  double seconds = 0;
  for (const StageCost& each : cost.stages) seconds += each.forward_s + each.backward_s;
  return seconds;
}

std::string with_commas(int64_t number) {
  const std::string digits = fmt::format("{}", number);
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

}  // namespace

struct Fitted::Impl {
  std::vector<Stage> stages;
  int64_t budget_bytes = 0;
  FitOptions options;
  std::mutex mutex;  // guards the members below
  std::condition_variable changed;
  std::map<std::string, Fit> fits;  // by the text of `measured_with`; never removed
  std::set<std::string> planning;   // keys of `fits` that are being measured
  std::thread::id planner{};        // the thread that measures
  const Fit* last = nullptr;

  SolveOptions solve_options() const {
    return {.max_depth = options.max_depth,
            .early_stop = options.checkpoint.early_stop,
            .frame_cost_s = options.frame_cost_s};
  }
  /// Returns the fit for the kind of the sample, which is measured if it is new. Holds no lock
  /// while stages run: they may call the chain themselves.
  const Fit& fit_for(const at::Tensor& sample);
  at::Tensor run_planned(const Plan& plan, at::Tensor input) const {
    return run(plan, stages, std::move(input), options.checkpoint,
               options.measure.moving.value_or(MoveOptions()));
  }

 private:
  Fit find(const at::Tensor& sample, const std::string& with) const;
  void verify(Fit& fit, const at::Tensor& sample) const;
};

const Fit& Fitted::Impl::fit_for(const at::Tensor& sample) {
  const std::string with = measured_with(stages.size(), sample, options.measure);
  const std::thread::id self = std::this_thread::get_id();
  std::unique_lock<std::mutex> lock(mutex);
  const auto may_go_on = [&] {
    return fits.contains(with) || planner == self || planner == std::thread::id();
  };
  while (!wait_until(may_go_on, lock, changed, std::chrono::hours(1))) {
  }
  if (const auto found = fits.find(with); found != fits.end()) {
    last = &found->second;
    return *last;
  }
  if (!planning.insert(with).second)
    throw_unsupported("a fitted chain was called by one of its own stages while it was measured",
                      "the input is of the kind that is being measured, so measuring would never "
                      "end",
                      "let the stage call the functions of the chain instead of the result of fit");
  const std::thread::id before = std::exchange(planner, self);
  lock.unlock();
  const auto over = c10::make_scope_exit([&] {
    if (!lock.owns_lock()) lock.lock();
    planning.erase(with);
    planner = before;
    changed.notify_all();
  });
  Fit fit = find(sample, with);
  lock.lock();
  last = &fits.emplace(with, std::move(fit)).first->second;
  return *last;
}

Fit Fitted::Impl::find(const at::Tensor& sample, const std::string& with) const {
  const bool has_file = !options.measurements.empty();
  std::optional<ChainCost> known;
  if (has_file) known = read_measurement(options.measurements, with);
  const bool was_measured = !known;
  ChainCost cost = known ? std::move(*known) : measure(stages, sample, options.measure);
  if (has_file && was_measured) add_measurement(options.measurements, with, cost);
  Frontier frontier = solve(cost, solve_options());
  Plan plan = frontier.plan(budget_bytes);
  Fit fit{std::move(cost), was_measured, std::move(frontier), std::move(plan), std::nullopt};
  if (options.verify) verify(fit, sample);
  return fit;
}

void Fitted::Impl::verify(Fit& fit, const at::Tensor& sample) const {
  int64_t unknown_bytes = 0;  // bytes that the costs do not show
  for (;;) {
    const Stage planned = [&](at::Tensor x) { return run_planned(fit.plan, std::move(x)); };
    fit.measured_peak = measure_peak(planned, sample, options.measure);
    if (*fit.measured_peak <= budget_bytes) return;
    const int64_t expected = simulate(fit.cost, fit.plan, solve_options()).peak_bytes;
    // The next plan must be smaller.
    unknown_bytes = std::max(unknown_bytes + 1, *fit.measured_peak - expected);
    try {
      fit.plan = fit.frontier.plan(std::max<int64_t>(0, budget_bytes - unknown_bytes));
    } catch (const InfeasibleBudget& error) {
      const int64_t least = error.minimum_bytes() + unknown_bytes;
      throw InfeasibleBudget(
          fmt::format(
              "remat::fit: no plan keeps a step under {} bytes: the smallest plan was expected "
              "to take {} bytes and takes about {}.\n"
              "Cause: the program keeps more memory than the costs of the stages say, such as "
              "results of stages, or copies of buffers.\n"
              "Hint: set a budget of at least {} bytes.",
              budget_bytes, error.minimum_bytes(), least, least),
          least);
    }
  }
}

Fitted::Fitted(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

at::Tensor Fitted::operator()(at::Tensor input) const {
  TORCH_CHECK_VALUE(input.defined(), "remat::Fitted: the input is an undefined tensor.");
  const Plan& plan = impl_->fit_for(input).plan;
  return impl_->run_planned(plan, std::move(input));
}

int64_t Fitted::budget_bytes() const { return impl_->budget_bytes; }

namespace {

/// Returns a copy of the part of the last fit that `read` selects.
template <class Impl, class Read>
auto of_last(Impl& impl, const Read& read) {
  const std::lock_guard<std::mutex> lock(impl.mutex);
  return read(*impl.last);
}

}  // namespace

Plan Fitted::plan() const {
  return of_last(*impl_, [](const Fit& fit) { return fit.plan; });
}
ChainCost Fitted::cost() const {
  return of_last(*impl_, [](const Fit& fit) { return fit.cost; });
}
bool Fitted::was_measured() const {
  return of_last(*impl_, [](const Fit& fit) { return fit.was_measured; });
}
Frontier Fitted::frontier() const {
  return of_last(*impl_, [](const Fit& fit) { return fit.frontier; });
}
std::optional<int64_t> Fitted::measured_peak() const {
  return of_last(*impl_, [](const Fit& fit) { return fit.measured_peak; });
}
Simulation Fitted::predicted() const {
  return of_last(*impl_, [this](const Fit& fit) {
    return simulate(fit.cost, fit.plan, impl_->solve_options());
  });
}

std::string Fitted::picture() const {
  return of_last(*impl_, [this](const Fit& fit) {
    return frontier_picture(fit.frontier, step_seconds(fit.cost), impl_->budget_bytes,
                            simulate(fit.cost, fit.plan, impl_->solve_options()));
  });
}

namespace {

/// Returns the treatment of a stage by a plan, in words.
std::string way_of(const Plan& plan, int64_t number) {
  const auto moves = [&](int64_t first) {
    return std::binary_search(plan.moved().begin(), plan.moved().end(), first);
  };
  for (const PlanRegion& region : plan.regions()) {
    if (region.first > number || region.last < number) continue;
    return moves(region.first) ? "input moved, recomputed" : "recomputed";
  }
  return moves(number) ? "moved" : "kept";
}

}  // namespace

std::string Fitted::table() const {
  return of_last(*impl_, [this](const Fit& fit) {
    const SolveOptions options = impl_->solve_options();
    const auto num_stages = static_cast<int64_t>(fit.cost.stages.size());
    const Simulation plain = simulate(fit.cost, Plan(num_stages), options);
    const double step_s = step_seconds(fit.cost);
    std::string text = fmt::format("{:<32} {:>16} {:>8} {:>11} {:>8} {:>6}\n", "regions",
                                   "peak bytes", "", "step time", "regions", "depth");
    const auto add = [&](const std::string& name, const Plan& plan) {
      const Simulation each = simulate(fit.cost, plan, options);
      const double share = static_cast<double>(each.peak_bytes) /
                           static_cast<double>(std::max<int64_t>(1, plain.peak_bytes));
      text += fmt::format("{:<32} {:>16} {:>7.1f}% {:>9.2f} x {:>8} {:>6}\n", name,
                          with_commas(each.peak_bytes), 100 * share,
                          step_s > 0 ? 1 + each.extra_s / step_s : 1.0, each.frames, each.depth);
    };
    add("none", Plan(num_stages));
    std::vector<PlanRegion> each_stage;
    for (int64_t i = 1; i < num_stages; ++i) each_stage.push_back({i, i});
    if (!each_stage.empty()) add("each stage but the last", Plan(num_stages, each_stage));
    add("the least memory", fit.frontier.plan(fit.frontier.points().front().bytes));
    add("chosen for " + with_commas(impl_->budget_bytes), fit.plan);
    if (fit.measured_peak)
      text += fmt::format("{:<32} {:>16}\n", "... as one step has shown",
                          with_commas(*fit.measured_peak));
    if (fit.cost.moving)
      text += fmt::format(
          "{:<32} {:>16} there, {} back; what runs beside takes {:.0f} % of that longer\n",
          "copies of 1,000,000 bytes take",
          fmt::format("{:.3f} ms", 1e9 * fit.cost.moving->store_s_per_byte),
          fmt::format("{:.3f} ms", 1e9 * fit.cost.moving->load_s_per_byte),
          100 * fit.cost.moving->held_up_share);
    text += fmt::format("plan: {}\n\n{:>5} {:>11} {:>12} {:>14} {:>14} {:>6}   {}\n",
                        fit.plan.to_string(), "stage", "forward ms", "backward ms", "output bytes",
                        "saved bytes", "calls", "what becomes of them");
    const std::vector<int64_t> calls = fit.plan.calls();
    for (std::size_t i = 0; i < fit.cost.stages.size(); ++i) {
      const StageCost& stage = fit.cost.stages[i];
      text += fmt::format("{:>5} {:>11.3f} {:>12.3f} {:>14} {:>14} {:>6}   {}\n", i + 1,
                          1e3 * stage.forward_s, 1e3 * stage.backward_s,
                          with_commas(stage.output_bytes), with_commas(stage.saved_bytes), calls[i],
                          way_of(fit.plan, static_cast<int64_t>(i) + 1));
    }
    return text;
  });
}

Fitted fit(std::vector<Stage> stages, const at::Tensor& sample, int64_t budget_bytes,
           FitOptions options) {
  TORCH_CHECK_VALUE(sample.defined(), "remat::fit: the sample is an undefined tensor.");
  TORCH_CHECK_VALUE(budget_bytes >= 0, "remat::fit: the budget is ", budget_bytes,
                    " bytes.\nHint: give 0 or more.");
  auto impl = std::make_shared<Fitted::Impl>();
  impl->stages = std::move(stages);
  impl->budget_bytes = budget_bytes;
  impl->options = std::move(options);
  impl->options.measure.early_stop = impl->options.checkpoint.early_stop;
  impl->fit_for(sample);
  return Fitted(std::move(impl));
}

}  // namespace remat
