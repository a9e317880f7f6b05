// Measures the search for a chain's frontier of time and memory, for all budgets at once. See
// METHOD.md.

#include <remat/plan.h>
#include <sys/resource.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/arguments.h"
#include "bench/measure.h"

namespace {

using remat::ChainCost;
using remat::Frontier;
using remat::StageCost;

struct Case {
  std::string name;
  ChainCost cost;
  remat::SolveOptions options{};
};

/// Embedding, blocks, head and loss. The unit of bytes is a block's output. `noise` is the share by
/// which the seconds of blocks differ, as measured ones do.
ChainCost transformer(int64_t blocks, double noise) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> share(0, noise);
  const auto stage = [](double seconds, int64_t output, int64_t saved) {
    return StageCost{.forward_s = seconds,
                     .backward_s = 2 * seconds,
                     .forward_to_last_save_s = seconds * 2 / 3,
                     .output_bytes = output,
                     .saved_bytes = saved,
                     .grad_bytes = output,
                     .saves_output = false};
  };
  ChainCost cost;
  cost.stages.push_back(stage(0.1, 1, 0));
  for (int64_t i = 0; i < blocks; ++i) cost.stages.push_back(stage(1 + share(random), 1, 16));
  cost.stages.push_back(stage(0.5, 4, 4));
  cost.stages.emplace_back();
  return cost;
}

/// A chain without equal stages: times of six digits, bytes up to a million.
ChainCost random_chain(int64_t stages) {
  std::mt19937_64 random(2);
  const auto number = [&](int64_t high) {
    return std::uniform_int_distribution<int64_t>(1, high)(random);
  };
  ChainCost cost;
  for (int64_t i = 0; i < stages; ++i) {
    StageCost stage{.forward_s = static_cast<double>(number(1'000'000)),
                    .output_bytes = number(1'000'000),
                    .saved_bytes = number(2'000'000)};
    stage.grad_bytes = stage.output_bytes;
    cost.stages.push_back(stage);
  }
  cost.stages.emplace_back();
  return cost;
}

/// Returns a chain in which half of the stages do not save their inputs.
ChainCost half_unsaved(ChainCost cost) {
  std::mt19937_64 random(5);
  for (StageCost& stage : cost.stages) stage.saves_input = random() % 2 == 0;
  return cost;
}

std::vector<Case> cases(bool smoke) {
  std::vector<Case> all;
  for (const int64_t blocks : smoke ? std::vector<int64_t>{12} : std::vector<int64_t>{24, 48, 96}) {
    const std::string name = std::to_string(blocks) + " blocks";
    all.push_back({name + ", equal", transformer(blocks, 0)});
    all.push_back({name + ", times differ", transformer(blocks, 0.05)});
  }
  const int64_t most = smoke ? 12 : 96;
  all.push_back({std::to_string(most) + " blocks, times differ, half do not save their input",
                 half_unsaved(transformer(most, 0.05))});
  all.push_back({std::to_string(most) + " blocks, times differ, max_depth = 3",
                 transformer(most, 0.05),
                 {.max_depth = 3}});
  all.push_back({std::to_string(most) + " blocks, times differ, eps = 0.01",
                 transformer(most, 0.05),
                 {.eps = 0.01}});
  for (const int64_t stages : smoke ? std::vector<int64_t>{12} : std::vector<int64_t>{32, 64, 96})
    all.push_back({std::to_string(stages) + " random stages", random_chain(stages)});
  return all;
}

/// Checks that the simulated plan of every point costs as much as the point says, or with eps at
/// most that much.
void verify(const Case& each, const Frontier& frontier) {
  for (const remat::FrontierPoint& point : frontier.points()) {
    const remat::Simulation simulation =
        remat::simulate(each.cost, frontier.plan(point.bytes), each.options);
    const double difference = simulation.extra_s - point.extra_s;
    const bool is_right =
        each.options.eps > 0
            ? simulation.peak_bytes <= point.bytes && difference <= 1e-9 * point.extra_s
            : simulation.peak_bytes == point.bytes && std::abs(difference) <= 1e-9 * point.extra_s;
    if (!is_right)
      throw std::runtime_error(each.name + ": a plan does not cost what its point says");
  }
}

int64_t most_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

int run(int argc, char** argv) {
  const bench::Arguments arguments = bench::parse(argc, argv);
  const int64_t before = most_resident_bytes();
  if (!arguments.smoke)
    std::fprintf(stderr, "%-46s %8s %10s %10s\n", "frontier of all budgets, exact", "points",
                 "min [ms]", "median");
  for (const Case& each : cases(arguments.smoke)) {
    const Frontier frontier = remat::solve(each.cost, each.options);
    verify(each, frontier);
    if (arguments.smoke) continue;
    std::vector<double> times;
    for (int64_t i = 0; i < arguments.samples; ++i) {
      const int64_t start = bench::now_ns(arguments.clock);
      const Frontier again = remat::solve(each.cost, each.options);
      times.push_back(static_cast<double>(bench::now_ns(arguments.clock) - start));
      if (again.points().size() != frontier.points().size())
        throw std::runtime_error(each.name + ": two runs differ");
    }
    const bench::Statistics result = bench::statistics(times);
    const auto points = static_cast<long long>(frontier.points().size());
    bench::print_json("plan_curve",
                      bench::text("\"chain\": \"%s\", \"points\": %lld", each.name.c_str(), points),
                      arguments, result);
    std::fprintf(stderr, "%-46s %8lld %10.2f %10.2f\n", each.name.c_str(), points,
                 result.min_ns / 1e6, result.median_ns / 1e6);
  }
  if (!arguments.smoke)
    std::fprintf(stderr, "most memory of the process beyond its start: %.0f MB\n",
                 static_cast<double>(most_resident_bytes() - before) / 1e6);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::main_of(run, argc, argv); }
