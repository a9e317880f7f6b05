// What plans gain whose regions may keep results, and that may move what is saved: a step's time beside that of plans
// that only recompute, at equal budgets. See METHOD.md.

#include <remat/plan.h>
#include <torch/torch.h>

#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bench/arguments.h"
#include "bench/measure.h"
#include "bench/rounds.h"
#include "examples/char_transformer/model.h"

namespace {

using remat::ChainCost;
using remat::Frontier;
using remat::Plan;
using torch::Tensor;

/// The demo's model as a chain, with a loss that needs no targets.
class Chain {
 public:
  Chain(const ModelOptions& options, int64_t batch, remat::MoveOptions moving)
      : moving(std::move(moving)),
        model_(options, Checkpointing::None),
        ids_(torch::randint(options.vocabulary, {batch, options.context}, torch::kLong)),
        stages_(model_->stages()) {
    stages_.emplace_back([](const Tensor& scores) { return scores.logsumexp(-1).mean(); });
    for (Tensor& each : model_->parameters()) each.mutable_grad() = torch::zeros_like(each);
  }

  const std::vector<remat::Stage>& stages() const { return stages_; }
  const Tensor& input() const { return ids_; }

  void step(const Plan& plan) {
    model_->zero_grad(/*set_to_none=*/false);
    remat::run(plan, stages_, ids_, {}, policies, moving).backward();
  }
  std::vector<Tensor> gradients(const Plan& plan) {
    torch::manual_seed(2);
    step(plan);
    std::vector<Tensor> all;
    for (const Tensor& each : model_->parameters()) all.push_back(each.grad().clone());
    return all;
  }
  int64_t peak_bytes(const Plan& plan) {
    remat::MemoryMeter meter;
    const int64_t before = meter.live_bytes();
    meter.reset_peak();
    step(plan);
    return meter.peak_bytes() - before;
  }

  const std::vector<remat::Policy> policies = remat::policies_to_try();
  const remat::MoveOptions moving;

 private:
  CharTransformer model_;
  const Tensor ids_;
  std::vector<remat::Stage> stages_;
};

struct Candidate {
  std::string name;
  Plan plan;
  int64_t budget = 0;
  remat::Simulation predicted{};
  int64_t peak_bytes = 0;
};

void run_with(const bench::Arguments& arguments, const char* model, double dropout,
              const std::string& directory) {
  ModelOptions options;
  options.vocabulary = 65, options.dropout = dropout;
  int64_t batch = 8;
  if (arguments.smoke) options.blocks = 3, options.context = 16, options.width = 32, batch = 2;
  torch::manual_seed(1);
  remat::MoveOptions moving{.directory = directory};
  if (arguments.smoke) moving.min_bytes = 0;
  Chain chain(options, batch, moving);
  const ChainCost cost = remat::measure(
      chain.stages(), chain.input(),
      {.repeats = arguments.smoke ? 1 : 7, .policies = chain.policies, .moving = chain.moving});
  ChainCost may_keep = cost;
  may_keep.moving.reset();
  ChainCost may_move = cost, without = may_keep;
  double plain_s = 0;
  for (remat::StageCost& each : may_move.stages) {
    each.keeping.clear();
    plain_s += each.forward_s + each.backward_s;
  }
  without.stages = may_move.stages;
  if (!cost.moving) throw std::runtime_error("WRONG: nothing can move.");
  std::fprintf(stderr, "copies: %.3f ms a MB there, %.3f back; held up: %.2f of that\n",
               1e9 * cost.moving->store_s_per_byte, 1e9 * cost.moving->load_s_per_byte,
               cost.moving->held_up_share);
  const Frontier regions = remat::solve(without), keeping = remat::solve(may_keep),
                 moves = remat::solve(may_move), all_ways = remat::solve(cost);
  const int64_t least = regions.points().front().bytes, most = regions.points().back().bytes;

  std::vector<Candidate> all{{"no regions", Plan(static_cast<int64_t>(cost.stages.size())), most}};
  for (const int64_t percent : {25, 50, 75}) {
    const int64_t budget = least + (most - least) * percent / 100;
    const std::string share = std::to_string(percent) + " % of the span, ";
    all.push_back({share + "regions", regions.plan(budget), budget});
    all.push_back({share + "keeping", keeping.plan(budget), budget});
    all.push_back({share + "moving", moves.plan(budget), budget});
    all.push_back({share + "both", all_ways.plan(budget), budget});
  }
  std::vector<bench::Cell> cells;
  const std::vector<Tensor> expected = chain.gradients(all.front().plan);
  for (Candidate& each : all) {
    bench::require_plain(chain.gradients(each.plan), expected, each.name.c_str());
    each.predicted = remat::simulate(cost, each.plan);
    each.peak_bytes = chain.peak_bytes(each.plan);
    if (each.peak_bytes > each.budget + 16)  // the loss and its gradient
      throw std::runtime_error("WRONG: a plan took " + std::to_string(each.peak_bytes) +
                               " bytes of " + std::to_string(each.budget) + ": " +
                               each.plan.to_string());
    cells.emplace_back([&chain, &each] { chain.step(each.plan); });
  }
  if (arguments.smoke) return;

  bench::measure(cells, arguments);
  std::fprintf(stderr, "%-34s %10s %9s %10s %9s %11s %11s %9s\n", model, "min [ms]", "of plain",
               "predicted", "of regions", "budget", "peak bytes", "predicted");
  const double plain_ns = cells[0].result().min_ns;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Candidate& each = all[i];
    const bench::Statistics result = cells[i].result();
    const std::size_t beside = i == 0 ? 0 : i - (i - 1) % 4;  // the plan of regions for that budget
    const double of_regions = result.min_ns / cells[beside].result().min_ns;
    bench::print_json(
        "plan_keeping",
        bench::text("\"model\": \"%s\", \"plan\": \"%s\"", model, each.name.c_str()), arguments,
        result,
        bench::text("\"budget\": %lld, \"peak_bytes\": %lld, \"predicted_bytes\": %lld",
                    static_cast<long long>(each.budget), static_cast<long long>(each.peak_bytes),
                    static_cast<long long>(each.predicted.peak_bytes)));
    std::fprintf(stderr, "%-34s %10.2f %9.3f %10.3f %9.3f %11lld %11lld %+9lld\n  %s\n",
                 each.name.c_str(), result.min_ns / 1e6, result.min_ns / plain_ns,
                 (plain_s + each.predicted.extra_s) / plain_s, of_regions,
                 static_cast<long long>(each.budget), static_cast<long long>(each.peak_bytes),
                 static_cast<long long>(each.peak_bytes - each.predicted.peak_bytes),
                 each.plan.to_string().c_str());
  }
}

int run(int argc, char** argv) {
  std::string directory = std::filesystem::temp_directory_path().string();
  const bench::Arguments arguments = bench::parse(argc, argv, {{"--directory PATH", &directory}});
  const remat::MemoryMeter first;  // before the tensors it shall count
  run_with(arguments, "the demo's model", 0.1, directory);
  run_with(arguments, "the demo's model, no dropout", 0, directory);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::main_of(run, argc, argv); }
