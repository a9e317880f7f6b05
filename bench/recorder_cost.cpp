// Measures a recorder, or a meter of a device, while it is alive: a step of the demo's model, and a
// chain of regions that do almost nothing. See METHOD.md.

#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/arguments.h"
#include "bench/measure.h"
#include "examples/char_transformer/model.h"
#include "remat/allocations.h"
#include "remat/memory.h"
#include "remat/report.h"

namespace {

struct Variant {
  const char* name;
  std::optional<remat::RecorderOptions> recorder{};
  bool has_meter = false;        ///< a meter of the device, made for each run and read after it
  bool has_allocations = false;  ///< a RecordAllocationsGuard
};

std::vector<Variant> variants(const at::Device& device) {
  std::vector<Variant> all{{"no recorder"},
                           {"without memory", remat::RecorderOptions{.memory = false}},
                           {"a recorder", remat::RecorderOptions{}},
                           {"with operators", remat::RecorderOptions{.operators = true}}};
  if (device.is_cpu()) return all;
  // The first variant twice shows how far it differs from itself.
  all.insert(all.begin() + 1, {{"no recorder, again"}, {.name = "a meter", .has_meter = true}});
  all.push_back(
      {.name = "with allocations", .recorder = remat::RecorderOptions{}, .has_allocations = true});
  return all;
}

/// The recorder, meter and guard of a variant, which live while its work runs.
class Alive {
 public:
  Alive(const Variant& variant, const at::Device& device) {
    if (variant.has_meter) meter_.emplace(device);
    if (variant.recorder) recorder_.emplace(*variant.recorder);
    if (variant.has_allocations) allocations_.emplace();
  }
  /// Reads the meter, if there is one, as a program does after a step.
  void ask() {
    if (!meter_) return;
    if (meter_->peak_bytes() < meter_->live_bytes()) throw std::runtime_error("WRONG: a meter");
    meter_->reset_peak();
  }
  const remat::Recorder* recorder() const { return recorder_ ? &*recorder_ : nullptr; }

 private:
  std::optional<remat::MemoryMeter> meter_;
  std::optional<remat::Recorder> recorder_;
  std::optional<remat::RecordAllocationsGuard> allocations_;
};

/// Work to run, with `regions` first runs each time.
struct Work {
  const char* name;
  int64_t regions;
  std::function<std::vector<torch::Tensor>()> run;
};

std::vector<Work> works(bool smoke, const at::Device& device) {
  ModelOptions options;
  options.vocabulary = 64;
  if (smoke) options.blocks = 4, options.context = 16, options.width = 32;
  torch::manual_seed(1);
  CharTransformer model(options, Checkpointing::EveryBlock);
  model->to(device);
  const torch::Tensor ids =
      torch::randint(options.vocabulary, {8, options.context + 1}, torch::kLong).to(device);
  const auto step = [model, ids]() mutable {
    torch::manual_seed(2);
    model->zero_grad();
    model->loss(ids.narrow(1, 0, ids.size(1) - 1), ids.narrow(1, 1, ids.size(1) - 1)).backward();
    std::vector<torch::Tensor> gradients;
    for (const torch::Tensor& each : model->parameters()) gradients.push_back(each.grad());
    return gradients;
  };
  const int64_t length = smoke ? 10 : 1000;
  const auto chain = [length, device] {
    const torch::Tensor x = torch::full({1}, 0.5, torch::TensorOptions(device).requires_grad(true));
    torch::Tensor y = x;
    for (int64_t i = 0; i < length; ++i)
      y = remat::checkpoint({.name = "sin"}, [](const torch::Tensor& t) { return t.sin(); }, y);
    y.backward();
    return std::vector<torch::Tensor>{x.grad()};
  };
  return {{"step of the demo's model", options.blocks, step},
          {"chain of regions of one sin", length, chain}};
}

/// Returns the number of events that a recorder gets from one run. It stores only the last one.
int64_t count_events(const Work& work, Variant variant, const at::Device& device) {
  if (!variant.recorder) return 0;
  variant.recorder->max_events = 1;
  const Alive alive(variant, device);
  work.run();
  return alive.recorder()->report().dropped_events + 1;
}

/// Returns whether the recorder counted all regions and changed no gradient.
bool is_right(const Work& work, const Variant& variant, const std::vector<torch::Tensor>& expected,
              const at::Device& device) {
  Alive alive(variant, device);
  const std::vector<torch::Tensor> found = work.run();
  alive.ask();
  bench::require_plain(found, expected, variant.name);
  if (alive.recorder() == nullptr) return true;
  const remat::Report report = alive.recorder()->report();
  return report.regions.size() == 1 && report.regions[0].calls == work.regions &&
         report.regions[0].recomputes == work.regions;
}

int run(int argc, char** argv) {
  // A sample is one run of the work, so the length of samples is not used.
  std::string only, times = "1";
  const bench::Arguments arguments = bench::parse(
      argc, argv, {{"--only VARIANT", &only}, {"--steps N", &times}}, bench::RunsOn::AnyDevice);
  const at::Device device = arguments.device;
  // The counting allocator stays once it is installed, so all variants have it.
  const remat::MemoryMeter meter;
  const remat::MemoryMeter first(device);  // before the tensors that it counts

  if (!only.empty()) {  // to count instructions: the demo's model alone
    const Work work = works(arguments.smoke, device).front();
    for (const Variant& variant : variants(device))
      for (int64_t i = 0; variant.name == only && i < std::stoll(times); ++i) {
        Alive alive(variant, device);
        work.run();
        alive.ask();
      }
    return 0;
  }

  if (!arguments.smoke)
    std::fprintf(stderr, "%-44s %10s %12s %12s %10s %12s\n", "step of regions, recorded",
                 "min [ms]", "of the first", "of rounds", "events", "ns an event");
  for (const Work& work : works(arguments.smoke, device)) {
    std::vector<torch::Tensor> expected;
    for (const torch::Tensor& each : work.run()) expected.push_back(each.clone());
    const std::vector<Variant> all = variants(device);
    for (const Variant& variant : all)
      if (!is_right(work, variant, expected, device)) {
        std::fprintf(stderr, "WRONG: %s, %s\n", work.name, variant.name);
        return 1;
      }
    if (arguments.smoke) continue;

    std::vector<int64_t> events;
    for (const Variant& variant : all) events.push_back(count_events(work, variant, device));
    std::vector<std::vector<double>> ns(all.size());
    for (int64_t round = 0; round < arguments.samples; ++round)
      for (std::size_t turn = 0; turn < all.size(); ++turn) {
        // Each round begins with another variant, since each leaves its marks on the caches.
        const std::size_t i = (turn + static_cast<std::size_t>(round)) % all.size();
        const int64_t before = bench::now_ns(arguments);
        Alive alive(all[i], device);
        // A recorder is made before a sample, but a meter inside of it.
        const int64_t begin = all[i].has_meter ? before : bench::now_ns(arguments);
        work.run();
        alive.ask();
        ns[i].push_back(static_cast<double>(bench::now_ns(arguments) - begin));
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
      // Ratios within rounds: a slow moment of the machine is in both sides of a ratio.
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
