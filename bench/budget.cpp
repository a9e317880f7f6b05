// Measures the cost of a byte budget at shares of the plain peak: operator work by a frozen table
// of costs, and seconds. Compares other choices of values to drop, regions, and plans. See
// METHOD.md.

#include <fnmatch.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bench/arguments.h"
#include "bench/budget_nets.h"
#include "bench/measure.h"
#include "bench/rounds.h"
#include "examples/char_transformer/model.h"
#include "remat/budget.h"
#include "remat/budget_trial.h"
#include "remat/fit.h"
#include "remat/plan.h"

namespace {

using remat::budget::Choice;
using torch::Tensor;

constexpr int64_t no_limit = std::numeric_limits<int64_t>::max();

/// One way to run the step of a net.
struct Way {
  std::string name;
  std::function<Tensor()> loss;
  int64_t budget_bytes = 0;  ///< 0: without a budget
  Choice choice = Choice::Reverse;
  bool is_timed = true;
  // Results of one step.
  int64_t peak_bytes = 0;
  int64_t faults = 0;  ///< pages that the system gave in the step
  double extra = 0;    ///< operator work beyond the plain step's, in plain steps
  remat::BudgetReport report{};
};

/// Returns the pages that the system has given to the process.
int64_t num_faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

/// A net with its ways; the first is the plain one.
struct Net {
  const char* name;
  std::shared_ptr<torch::nn::Module> model;
  std::function<Tensor()> loss;
  std::vector<remat::Stage> stages{};  ///< the net as a chain: blocks, with one stage at each end
  Tensor input{};                      ///< of the stages
};

constexpr int percents[] = {80, 60, 50, 40, 30, 20, 15};

class Trial {
 public:
  /// `pattern`: selects the ways that take part beside plain.
  Trial(Net net, std::string pattern, bool smoke)
      : net_(std::move(net)), pattern_(std::move(pattern)), smoke_(smoke) {
    for (Tensor& each : net_.model->parameters()) each.mutable_grad() = torch::zeros_like(each);
    ways_.push_back({.name = "plain", .loss = net_.loss});
    learn();
    run_once(ways_.front());
    plain_s_ = work_.called_s;
    for (const Tensor& each : net_.model->parameters()) plain_.push_back(each.grad().clone());
    const std::pair<const char*, Choice> choices[] = {{"reverse", Choice::Reverse},
                                                      {"dtr", Choice::Dtr},
                                                      {"least recent", Choice::LeastRecent},
                                                      {"size", Choice::Size}};
    for (const auto& [name, choice] : choices)
      for (const int percent : percents)
        add({.name = bench::text("%s %d %%", name, percent),
             .loss = net_.loss,
             .budget_bytes = share(percent),
             .choice = choice,
             .is_timed = choice == Choice::Reverse});
    add({.name = "no limit", .loss = net_.loss, .budget_bytes = no_limit});
    if (net_.stages.empty()) return;
    count_runs();
    const auto num_stages = static_cast<int64_t>(net_.stages.size()), num_blocks = num_stages - 2;
    for (int64_t k = 2; k <= num_blocks; k += 2) {
      std::vector<remat::PlanRegion> regions;
      for (int64_t i = 1; i <= k; ++i) regions.push_back({i, i});
      const remat::Plan plan(num_stages, regions);
      add({.name = k == num_blocks ? "every block" : bench::text("first %d blocks", int(k)),
           .loss = [this, plan] { return remat::run(plan, net_.stages, net_.input); }});
    }
    for (const int percent : {80, 50, 30, 20, 15}) add_plan(percent);
  }
  Trial& operator=(Trial&&) = delete;  // the cells refer to it

  void report(const bench::Arguments& arguments) {
    std::vector<bench::Cell> cells;
    std::vector<const bench::Cell*> cell_of(ways_.size());
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < ways_.size(); ++i) {
      if (!ways_[i].is_timed || arguments.samples == 0) continue;
      cells.emplace_back([this, i] { step(ways_[i]); });
      places.push_back(i);
    }
    bench::measure(cells, arguments);
    for (std::size_t i = 0; i < places.size(); ++i) cell_of[places[i]] = &cells[i];
    std::fprintf(stderr, "%-20s %11s %6s %7s %9s %7s %7s %8s %8s %7s\n", net_.name, "peak bytes",
                 "%", "work", "evictions", "reruns", "faults", "min [ms]", "of plain", "search");
    const auto plain_peak = static_cast<double>(ways_.front().peak_bytes);
    for (std::size_t i = 0; i < ways_.size(); ++i) {
      const Way& way = ways_[i];
      const auto number = [](int64_t value) { return static_cast<long long>(value); };
      std::fprintf(stderr, "%-20s %11lld %6.1f %7.3f %9lld %7lld %7lld", way.name.c_str(),
                   number(way.peak_bytes), 100 * static_cast<double>(way.peak_bytes) / plain_peak,
                   1 + way.extra, number(way.report.evictions), number(way.report.reruns),
                   number(way.faults));
      const std::string found = bench::text(
          "\"peak_bytes\": %lld, \"work\": %.4f, \"evictions\": %lld, \"reruns\": %lld"
          ", \"over_bytes\": %lld, \"faults\": %lld",
          number(way.peak_bytes), 1 + way.extra, number(way.report.evictions),
          number(way.report.reruns), number(way.report.over_bytes), number(way.faults));
      const std::string params =
          bench::text("\"model\": \"%s\", \"way\": \"%s\"", net_.name, way.name.c_str());
      if (cell_of[i] == nullptr) {
        bench::print_json("budget", params, arguments, found);
      } else {
        const bench::Statistics result = cell_of[i]->result();
        bench::print_json("budget", params, arguments, result, found);
        std::fprintf(stderr, " %8.1f %8.3f %7.4f", result.min_ns / 1e6,
                     result.min_ns / cells[0].result().min_ns,
                     way.report.search_s * 1e9 / cells[0].result().min_ns);
      }
      std::fprintf(stderr, "%s\n", way.report.over_bytes > 0 ? "  over" : "");
    }
  }

 private:
  int64_t share(int percent) const { return ways_.front().peak_bytes * percent / 100; }

  bool is_wanted(const std::string& name) const {
    return fnmatch(pattern_.c_str(), name.c_str(), FNM_EXTMATCH) == 0;
  }

  void add(Way way) {
    if (!is_wanted(way.name)) return;
    run_once(way);
    const std::vector<Tensor> parameters = net_.model->parameters();
    std::vector<Tensor> gradients;
    for (const Tensor& each : parameters) gradients.push_back(each.grad());
    bench::require_plain(gradients, plain_, std::string(net_.name) + ", " + way.name);
    const bool is_budget = way.budget_bytes > 0;
    if (is_budget && way.report.over_bytes == 0 && way.peak_bytes > way.budget_bytes)
      throw std::runtime_error("WRONG: a peak is above its budget: " + way.name);
    way.extra = (is_budget ? work_.rerun_s : seconds_of_runs()) / plain_s_;
    ways_.push_back(std::move(way));
  }

  void add_plan(int percent) {
    const std::string name = bench::text("fit %d %%", percent);
    if (!is_wanted(name)) return;
    try {
      remat::Fitted fitted = remat::fit(net_.stages, net_.input, share(percent));
      add({.name = name, .loss = [fitted, input = net_.input]() mutable { return fitted(input); }});
    } catch (const remat::InfeasibleBudget&) {
      std::fprintf(stderr, "%s: no plan is that small\n", name.c_str());
    }
  }

  void step(const Way& way, int64_t budget_bytes, remat::BudgetReport* report) {
    torch::manual_seed(2);
    remat::budget::set_choice(way.choice);
    net_.model->zero_grad(/*set_to_none=*/false);
    std::optional<remat::BudgetGuard> budget;
    if (budget_bytes > 0) budget.emplace(remat::BudgetOptions{.bytes = budget_bytes});
    way.loss().backward();
    if (report != nullptr && budget) *report = budget->report();
  }
  void step(const Way& way) { step(way, way.budget_bytes, nullptr); }

  /// Learns the costs of all operators of the step.
  void learn() {
    remat::budget::set_costs({});
    remat::budget::learn_costs_from(std::numeric_limits<uint32_t>::max());
    remat::budget::begin_work();
    for (int i = 0; i < (smoke_ ? 1 : 8); ++i) step(ways_.front(), no_limit, nullptr);
    remat::budget::end_work();
    remat::budget::learn_costs_from(3);
    remat::budget::set_costs(remat::budget::costs());
  }

  /// Makes each stage count its runs, and finds the work of its forward.
  void count_runs() {
    Tensor x = net_.input;
    num_runs_.resize(net_.stages.size());
    for (std::size_t i = 0; i < net_.stages.size(); ++i) {
      const remat::BudgetGuard budget({.bytes = no_limit});
      remat::budget::begin_work();
      x = net_.stages[i](x).detach().requires_grad_(i + 1 < net_.stages.size());
      stage_s_.push_back(remat::budget::end_work().called_s);
      net_.stages[i] = [this, i, stage = net_.stages[i]](const Tensor& y) {
        ++num_runs_[i];
        return stage(y);
      };
    }
  }

  /// Returns the work of the stages that ran again in the latest step, without the stop of a
  /// recompute after the last save.
  double seconds_of_runs() const {
    double sum = 0;
    for (std::size_t i = 0; i < num_runs_.size(); ++i)
      sum += static_cast<double>(std::max<int64_t>(num_runs_[i] - 1, 0)) * stage_s_[i];
    return sum;
  }

  /// Runs one step and notes its peak, and the work of its operators.
  void run_once(Way& way) {
    remat::MemoryMeter meter;
    const int64_t before = meter.live_bytes();
    meter.reset_peak();
    step(way, way.budget_bytes, &way.report);
    const int64_t faults = num_faults();
    num_runs_.assign(num_runs_.size(), 0);
    step(way);
    way.faults = num_faults() - faults;
    way.peak_bytes = meter.peak_bytes() - before;
    if (way.budget_bytes == 0 && &way != &ways_.front()) return;
    remat::budget::begin_work();
    remat::BudgetReport report;
    step(way, way.budget_bytes == 0 ? no_limit : way.budget_bytes, &report);
    work_ = remat::budget::end_work();
    if (way.budget_bytes > 0 && report.evictions != way.report.evictions)
      std::fprintf(stderr, "%s: %lld evictions, then %lld\n", way.name.c_str(),
                   static_cast<long long>(way.report.evictions),
                   static_cast<long long>(report.evictions));
    if (way.budget_bytes > 0) way.report = report;
  }

  Net net_;
  const std::string pattern_;
  const bool smoke_;
  std::deque<Way> ways_;
  std::vector<Tensor> plain_;
  remat::budget::Work work_{};
  double plain_s_ = 0;
  std::vector<int64_t> num_runs_;  ///< of each stage in the latest step
  std::vector<double> stage_s_;
};

Net written_out(bool smoke) {
  const bench::NetSize size =
      smoke ? bench::NetSize{4, 32, 2, 16} : bench::NetSize{12, 128, 8, 128};
  bench::WrittenOutTransformer model(size, torch::randint(64, {size.batch, size.side + 1}));
  Net net{"transformer", model.ptr(), [model]() mutable { return model->loss(); }};
  net.stages = model->stages();
  net.input = model->ids();
  return net;
}

Net demo(bool smoke) {
  ModelOptions options;
  options.vocabulary = 64;
  if (smoke) options.blocks = 4, options.context = 16, options.width = 32;
  const Tensor ids = torch::randint(options.vocabulary, {16, options.context + 1});
  const Tensor inputs = ids.narrow(1, 0, options.context),
               targets = ids.narrow(1, 1, options.context);
  CharTransformer model(options, Checkpointing::None);
  Net net{"the demo's model", model.ptr(), [=]() mutable { return model->loss(inputs, targets); }};
  net.stages = model->stages();
  // One stage at the end, not two: output layer and loss.
  net.stages.back() = [output = net.stages.back(), targets](const Tensor& x) {
    return torch::cross_entropy_loss(output(x).flatten(0, 1), targets.flatten());
  };
  net.input = inputs;
  return net;
}

Net resnet(bool smoke) {
  const bench::NetSize size = smoke ? bench::NetSize{3, 8, 2, 8} : bench::NetSize{10, 24, 16, 24};
  bench::ResidualNet model(size, torch::randn({size.batch, 3, size.side, size.side}),
                           torch::randint(10, {size.batch}));
  return {"a residual net", model.ptr(), [model]() mutable { return model->loss(); }};
}

Net u_net(bool smoke) {
  const bench::NetSize size = smoke ? bench::NetSize{2, 8, 1, 16} : bench::NetSize{3, 12, 4, 64};
  bench::UNet model(size, torch::randn({size.batch, 4, size.side, size.side}));
  return {"a U-Net", model.ptr(), [model]() mutable { return model->loss(); }};
}

int run(int argc, char** argv) {
  std::string chosen, ways = "*";
  const bench::Arguments arguments =
      bench::parse(argc, argv, {{"--net NAME", &chosen}, {"--ways PATTERN", &ways}});
  const remat::MemoryMeter first;  // before the tensors that it counts
  const std::pair<const char*, Net (*)(bool)> nets[] = {
      {"transformer", written_out}, {"demo", demo}, {"resnet", resnet}, {"unet", u_net}};
  for (const auto& [name, make] : nets) {
    if (!chosen.empty() && chosen != name) continue;
    torch::manual_seed(1);
    Trial trial(make(arguments.smoke), ways, arguments.smoke);
    if (!arguments.smoke) trial.report(arguments);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::main_of(run, argc, argv); }
