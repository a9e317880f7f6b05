// What a recorder costs while it is alive: a step of the demo's model, and a chain of regions that do
// next to nothing. See METHOD.md.

#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/arguments.h"
#include "bench/measure.h"
#include "examples/char_transformer/model.h"
#include "remat/memory.h"
#include "remat/report.h"

namespace {

struct Variant {
  const char* name;
  std::optional<remat::RecorderOptions> recorder;
};

std::vector<Variant> variants() {
  return {{"no recorder", std::nullopt},
          {"without memory", remat::RecorderOptions{.memory = false}},
          {"a recorder", remat::RecorderOptions{}},
          {"with operators", remat::RecorderOptions{.operators = true}}};
}

/// Something to run; `regions` first runs each time.
struct Work {
  const char* name;
  int64_t regions;
  std::function<std::vector<torch::Tensor>()> run;
};

std::vector<Work> works(bool smoke) {
  ModelOptions options;
  options.vocabulary = 64;
  if (smoke) options.blocks = 4, options.context = 16, options.width = 32;
  torch::manual_seed(1);
  CharTransformer model(options, Checkpointing::EveryBlock);
  const torch::Tensor ids =
      torch::randint(options.vocabulary, {8, options.context + 1}, torch::kLong);
  const auto step = [model, ids]() mutable {
    torch::manual_seed(2);
    model->zero_grad();
    model->loss(ids.narrow(1, 0, ids.size(1) - 1), ids.narrow(1, 1, ids.size(1) - 1)).backward();
    std::vector<torch::Tensor> gradients;
    for (const torch::Tensor& each : model->parameters()) gradients.push_back(each.grad());
    return gradients;
  };
  const int64_t length = smoke ? 10 : 1000;
  const auto chain = [length] {
    const torch::Tensor x = torch::full({1}, 0.5, torch::requires_grad());
    torch::Tensor y = x;
    for (int64_t i = 0; i < length; ++i)
      y = remat::checkpoint({.name = "sin"}, [](const torch::Tensor& t) { return t.sin(); }, y);
    y.backward();
    return std::vector<torch::Tensor>{x.grad()};
  };
  return {{"step of the demo's model", options.blocks, step},
          {"chain of regions of one sin", length, chain}};
}

/// How many events a recorder gets from one run: all but the last one are dropped.
int64_t count_events(const Work& work, remat::RecorderOptions options) {
  options.max_events = 1;
  const remat::Recorder recorder(options);
  work.run();
  return recorder.report().dropped_events + 1;
}

/// Whether the recorder counted all regions and changed no gradient.
bool is_right(const Work& work, const Variant& variant,
              const std::vector<torch::Tensor>& expected) {
  std::unique_ptr<remat::Recorder> recorder;
  if (variant.recorder) recorder = std::make_unique<remat::Recorder>(*variant.recorder);
  const std::vector<torch::Tensor> found = work.run();
  for (std::size_t i = 0; i < expected.size(); ++i)
    if (!found[i].equal(expected[i])) return false;
  if (!recorder) return true;
  const remat::Report report = recorder->report();
  return report.regions.size() == 1 && report.regions[0].calls == work.regions &&
         report.regions[0].recomputes == work.regions;
}

int run(int argc, char** argv) {
  // A sample is one run of the work, so the length of samples is not asked for.
  const bench::Arguments arguments = bench::parse(argc, argv);
  // It stays once it is there, so all variants have it.
  const remat::MemoryMeter meter;

  if (!arguments.smoke)
    std::fprintf(stderr, "%-44s %10s %12s %12s %10s %12s\n", "step of regions, recorded",
                 "min [ms]", "of the first", "of rounds", "events", "ns an event");
  for (const Work& work : works(arguments.smoke)) {
    std::vector<torch::Tensor> expected;
    for (const torch::Tensor& each : work.run()) expected.push_back(each.clone());
    const std::vector<Variant> all = variants();
    for (const Variant& variant : all)
      if (!is_right(work, variant, expected)) {
        std::fprintf(stderr, "WRONG: %s, %s\n", work.name, variant.name);
        return 1;
      }
    if (arguments.smoke) continue;

    std::vector<int64_t> events;
    for (const Variant& variant : all)
      events.push_back(variant.recorder ? count_events(work, *variant.recorder) : 0);
    std::vector<std::vector<double>> ns(all.size());
    for (int64_t round = 0; round < arguments.samples; ++round)
      for (std::size_t turn = 0; turn < all.size(); ++turn) {
        // Each round begins with another one: what ran before leaves its mark on the caches.
        const std::size_t i = (turn + static_cast<std::size_t>(round)) % all.size();
        std::unique_ptr<remat::Recorder> recorder;
        if (all[i].recorder) recorder = std::make_unique<remat::Recorder>(*all[i].recorder);
        const int64_t begin = bench::now_ns(arguments.clock);
        work.run();
        ns[i].push_back(static_cast<double>(bench::now_ns(arguments.clock) - begin));
      }
    const bench::Statistics first = bench::statistics(ns[0]);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const bench::Statistics result = bench::statistics(ns[i]);
      const auto count = static_cast<long long>(events[i]);
      bench::print_json("recorder_cost",
                        bench::text("\"work\": \"%s\", \"recorder\": \"%s\", \"events\": %lld",
                                    work.name, all[i].name, count),
                        arguments, result);
      const std::string row =
          i == 0 ? bench::text("%s, %s", work.name, all[i].name) : bench::text("  %s", all[i].name);
      // Of the rounds: a slow moment of the machine is in both sides of a ratio.
      std::vector<double> ratios;
      for (std::size_t round = 0; round < ns[i].size(); ++round)
        ratios.push_back(ns[i][round] / ns[0][round]);
      const double ratio = bench::median(ratios), added = (ratio - 1) * first.median_ns;
      std::fprintf(stderr, "%-44s %10.2f %12.3f %12.3f %10lld %12.0f\n", row.c_str(),
                   result.min_ns / 1e6, result.min_ns / first.min_ns, ratio, count,
                   count == 0 ? 0 : added / static_cast<double>(count));
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::main_of(run, argc, argv); }
