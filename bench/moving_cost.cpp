// Measures the cost of moving saved tensors to a file, on the thread that saves and reads them and
// beside the copies themselves. See METHOD.md.

#include <ATen/ops/randn.h>
#include <remat/hooks.h>
#include <remat/memory.h>
#include <remat/tiers.h>
#include <torch/torch.h>

#include <cstdio>
#include <ctime>
#include <filesystem>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/arguments.h"
#include "bench/measure.h"

namespace {

using torch::Tensor;

int64_t processor_ns() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

enum class Guard { None, Tiers, Disk };

struct Side {
  const char* name;
  Guard guard;
  std::vector<double> thread_ns{}, process_ns{};  ///< of one step, one value a round
};

/// A chain in which each tensor between two operators is saved by one of them, or by both.
struct Work {
  const char* name;
  std::function<Tensor(Tensor)> layer;
};

class Chain {
 public:
  Chain(Work work, int64_t length, int64_t bytes, std::string directory)
      : work_(std::move(work)),
        length_(length),
        directory_(std::move(directory)),
        input_(at::randn({bytes / 4}).requires_grad_()) {}

  Tensor step(Guard kind) const {
    std::optional<remat::SaveInTiersGuard> tiers;
    std::optional<remat::SaveOnDiskGuard> disk;
    if (kind == Guard::Tiers)
      tiers.emplace(
          remat::SaveInTiersOptions{.host_bytes = 0, .directory = directory_, .min_bytes = 0});
    if (kind == Guard::Disk)
      disk.emplace(remat::SaveOnDiskOptions{.directory = directory_, .min_bytes = 0});
    Tensor y = input_ * 1;
    for (int64_t i = 0; i < length_; ++i) y = work_.layer(std::move(y));
    const Tensor loss = y.sum();
    y.reset();
    disk.reset();
    tiers.reset();
    return torch::autograd::grad({loss}, {input_})[0];
  }
  const char* name() const { return work_.name; }
  double moved_mebibytes() const {
    return static_cast<double>(length_ * input_.numel() * 4) / (1 << 20);
  }

 private:
  const Work work_;
  const int64_t length_;
  const std::string directory_;
  const Tensor input_;
};

int run(int argc, char** argv) {
  std::string directory = std::filesystem::temp_directory_path().string();
  std::string only;  // the only side to run, for a profiler
  const bench::Arguments arguments =
      bench::parse(argc, argv, {{"--directory PATH", &directory}, {"--only SIDE", &only}});
  const int64_t length = arguments.smoke ? 4 : 48, bytes = arguments.smoke ? 1 << 12 : 1 << 20;
  const std::vector<Work> works{
      {"saved once", [](Tensor x) { return x.sin(); }},
      {"saved twice", [](Tensor x) { return x.exp().neg().exp().sin(); }}};
  for (const Work& work : works) {
    const Chain chain(work, length, bytes, directory);
    std::vector<Side> sides{{"plain", Guard::None}, {"tiers", Guard::Tiers}, {"file", Guard::Disk}};
    const Tensor expected = chain.step(Guard::None);
    for (const Side& side : sides)
      bench::require_plain({chain.step(side.guard)}, {expected}, side.name);
    if (arguments.smoke) continue;
    for (int64_t round = 0; round < arguments.samples; ++round)
      for (Side& side : sides) {
        if (!only.empty() && only != side.name) continue;
        const int64_t thread = bench::now_ns(bench::Clock::Thread), process = processor_ns();
        chain.step(side.guard);
        side.thread_ns.push_back(static_cast<double>(bench::now_ns(bench::Clock::Thread) - thread));
        side.process_ns.push_back(static_cast<double>(processor_ns() - process));
      }
    if (!only.empty()) continue;
    std::fprintf(stderr, "%-14s %26s %26s\n", chain.name(), "thread's us a MiB, beyond",
                 "processors' us a MiB, beyond");
    const bench::Statistics thread_0 = bench::statistics(sides[0].thread_ns),
                            process_0 = bench::statistics(sides[0].process_ns);
    for (const Side& side : sides) {
      const bench::Statistics thread = bench::statistics(side.thread_ns),
                              process = bench::statistics(side.process_ns);
      const double unit = 1e3 * chain.moved_mebibytes();
      bench::print_json(
          "moving_cost",
          bench::text("\"work\": \"%s\", \"guard\": \"%s\", \"clock\": \"thread\"", chain.name(),
                      side.name),
          arguments,
          bench::text("\"min_ns\": %.1f, \"median_ns\": %.1f, \"mad_ns\": %.1f, \"samples\": %zu, "
                      "\"process_min_ns\": %.1f, \"mebibytes\": %.1f",
                      thread.min_ns, thread.median_ns, thread.mad_ns, thread.samples,
                      process.min_ns, chain.moved_mebibytes()));
      std::fprintf(stderr, "  %-12s %12.1f %13.1f %12.1f %13.1f\n", side.name, thread.min_ns / unit,
                   (thread.min_ns - thread_0.min_ns) / unit, process.min_ns / unit,
                   (process.min_ns - process_0.min_ns) / unit);
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::main_of(run, argc, argv); }
