// What a checkpointed training step of the demo's model costs: over (plain step + one forward). See
// METHOD.md.

#include <ATen/Parallel.h>

#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/measure.h"
#include "examples/char_transformer/model.h"

namespace {

using bench::Clock;

/// One model in one of the modes; forward and backward over a fixed batch.
class Step {
 public:
  Step(const ModelOptions& options, Checkpointing mode, const torch::Tensor& ids) : ids_(ids) {
    torch::manual_seed(1);
    model_ = CharTransformer(options, mode);
  }
  torch::Tensor forward() { return model_->loss(ids_.narrow(1, 0, ids_.size(1) - 1), targets()); }
  void run() {
    model_->zero_grad();
    forward().backward();
  }
  std::vector<torch::Tensor> gradients() {
    torch::manual_seed(2);
    run();
    std::vector<torch::Tensor> all;
    for (const torch::Tensor& each : model_->parameters()) all.push_back(each.grad().clone());
    return all;
  }

 private:
  torch::Tensor targets() const { return ids_.narrow(1, 1, ids_.size(1) - 1); }
  CharTransformer model_ = nullptr;
  torch::Tensor ids_;
};

int run(int argc, char** argv) {
  bool smoke = false;
  int64_t samples = 15, threads = 1;
  Clock clock = Clock::Wall;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--smoke")
      smoke = true;
    else if (word == "--no-peer")
      continue;
    else if (word == "--samples" && i + 1 < argc)
      samples = std::stoll(argv[++i]);
    else if (word == "--threads" && i + 1 < argc)
      threads = std::stoll(argv[++i]);
    else if (word == "--clock" && i + 1 < argc)
      clock = std::string(argv[++i]) == "thread" ? Clock::Thread : Clock::Wall;
    else
      throw std::runtime_error(
          "usage: step_cost [--smoke] [--samples N] [--threads N] [--clock wall|thread]");
  }
  at::set_num_threads(static_cast<int>(threads));
  const std::filesystem::path folder = REMAT_BENCH_FOLDER;
  const std::string commit =
      bench::output_of("git -C '" + folder.string() + "' describe --always --dirty");
  ModelOptions options;
  options.vocabulary = 64;
  if (smoke) options.blocks = 4, options.context = 16, options.width = 32;
  const torch::Tensor ids =
      torch::randint(options.vocabulary, {8, options.context + 1}, torch::kLong);
  Step plain(options, Checkpointing::None, ids), blocks(options, Checkpointing::EveryBlock, ids),
      groups(options, Checkpointing::NestedGroups, ids);
  const std::vector<torch::Tensor> expected = plain.gradients();
  for (Step* each : {&blocks, &groups}) {
    const std::vector<torch::Tensor> found = each->gradients();
    for (std::size_t i = 0; i < expected.size(); ++i)
      if (!found[i].equal(expected[i])) {
        std::fprintf(stderr, "WRONG: a gradient is not the plain one\n");
        return 1;
      }
  }
  if (smoke) return 0;

  struct Cell {
    const char* name;
    std::function<void()> work;
    std::vector<double> ns{};
  };
  std::vector<Cell> cells{{"one forward", [&] { plain.forward(); }},
                          {"plain step", [&] { plain.run(); }},
                          {"every block checkpointed", [&] { blocks.run(); }},
                          {"nested groups of blocks", [&] { groups.run(); }}};
  for (int64_t round = -1; round < samples; ++round)  // the first one warms up
    for (Cell& cell : cells) {
      const int64_t begin = bench::now_ns(clock);
      cell.work();
      if (round >= 0) cell.ns.push_back(static_cast<double>(bench::now_ns(clock) - begin));
    }
  const auto minimum = [&](int i) { return bench::statistics(cells[i].ns).min_ns; };
  const auto median = [&](int i) { return bench::statistics(cells[i].ns).median_ns; };
  std::fprintf(stderr, "%-44s %10s %12s %12s\n", "step of the demo's model", "min [ms]",
               "of plain+fwd", "of medians");
  for (int i = 0; i < 4; ++i) {
    const Cell& cell = cells[static_cast<std::size_t>(i)];
    bench::print_json("step_cost",
                      std::string("\"step\": \"") + cell.name + "\", \"clock\": \"" +
                          (clock == Clock::Wall ? "wall" : "thread") + '"',
                      bench::statistics(cell.ns), at::get_num_threads(), commit);
    std::fprintf(stderr, "%-44s %10.1f %12.3f %12.3f\n", cell.name, minimum(i) / 1e6,
                 minimum(i) / (minimum(0) + minimum(1)), median(i) / (median(0) + median(1)));
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
