// Trains a deep transformer under a byte budget. `fit` measures it and finds the fastest plan
// within the budget; training then has a memory limit of that budget.
//
// The program prints the measurements and the chosen plan. A table compares the planner's plans
// with plans by hand (no regions, every block, checkpoint_sequential): each with its predicted and
// measured peak and time. A picture shows them on the whole frontier of memory and time. Finally a
// few steps train under the limit, beyond which an allocation fails.
//
// Exit status: 0, or 1 if a prediction of memory was off by more than 2 %, gradients differ, or the
// training did not fit; 2 if it was called wrongly or the budget is below the least possible.

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "budget/picture.h"
#include "char_transformer/model.h"
#include "char_transformer/text.h"
#include "command_line.h"
#include "remat/remat.h"
#include "target.h"

namespace {

constexpr uint64_t kSeed = 1611;

constexpr const char* kUsage =
    "usage: budget [--budget MB|free] [--blocks N] [--steps N] [--text FILE] [--small] [--out "
    "DIR]\n"
    "              [--device NAME] [--dtype NAME]\n"
    "  --budget MB  for activations and their gradients (default: a quarter of what training\n"
    "               without regions takes); 'free': what the device has free now, less a margin\n"
    "  --blocks N   of the transformer (default: 24)\n"
    "  --steps N    of training under the limit (default: 5)\n"
    "  --text FILE  the text to learn (default: " REMAT_EXAMPLE_TEXT
    ")\n"
    "  --small      narrow blocks: a few seconds, to see that everything works\n"
    "  --out DIR    where to write the picture (default: " REMAT_EXAMPLE_OUT
    ")\n" REMAT_TARGET_USAGE;

struct Options {
  std::string text = REMAT_EXAMPLE_TEXT;
  std::string out = REMAT_EXAMPLE_OUT;
  std::optional<double> budget_mb;
  bool takes_free = false;
  Target target;
  int64_t steps = 5;
  int64_t repeats = 5;  // timed steps of each plan
  int64_t batch_size = 8;
  ModelOptions model;
};

Options parse(int argc, char** argv) {
  Options options;
  options.model.blocks = 24;
  parse_options(argc, argv, [&](const std::string& name, const auto& value) {
    if (name == "--budget") {
      const std::string budget = value();
      options.takes_free = budget == "free";
      if (!options.takes_free) options.budget_mb = parse_number(name, budget, 0.0, 1e9);
    } else if (name == "--blocks") {
      options.model.blocks = parse_number<int64_t>(name, value(), 6, 1'000'000'000);
    } else if (name == "--steps") {
      options.steps = parse_number<int64_t>(name, value(), 1, 1'000'000'000);
    } else if (name == "--text") {
      options.text = value();
    } else if (name == "--out") {
      options.out = value();
    } else if (name == "--small") {
      options.model.width = 64;
      options.model.context = 64;
      options.batch_size = 4;
      options.repeats = 1;
      options.steps = 2;
    } else {
      return options.target.take(name, value);
    }
    return true;
  });
  return options;
}

struct Candidate {
  std::string name;
  remat::Plan plan;
  remat::Simulation predicted;
  int64_t peak_bytes = 0;  // measured
  std::vector<double> seconds;

  double least_seconds() const { return *std::min_element(seconds.begin(), seconds.end()); }
};

// Runs forward and backward, with the same dropout each time.
double step(CharTransformer& model, const std::vector<remat::Stage>& stages,
            const remat::Plan& plan, const torch::Tensor& ids, const Target& target) {
  torch::manual_seed(kSeed);
  model->zero_grad(/*set_to_none=*/false);
  const auto start = std::chrono::steady_clock::now();
  remat::run(plan, stages, ids).backward();
  target.wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::vector<Candidate> candidates(const remat::Fitted& fitted, int64_t blocks) {
  const remat::ChainCost cost = fitted.cost();
  const remat::Frontier frontier = fitted.frontier();
  const auto stages = static_cast<int64_t>(cost.stages.size());
  // Moves plans of the blocks behind the embedding.
  const auto around_blocks = [&](const remat::Plan& plan) {
    std::vector<remat::PlanRegion> regions = plan.regions();
    for (remat::PlanRegion& region : regions) region = {region.first + 1, region.last + 1};
    return remat::Plan(stages, std::move(regions));
  };
  std::vector<remat::PlanRegion> every_block;
  for (int64_t k = 1; k <= blocks; ++k) every_block.push_back({k, k});

  std::vector<Candidate> all;
  const auto add = [&](std::string name, const remat::Plan& plan) {
    all.push_back({std::move(name), plan, remat::simulate(cost, plan), 0, {}});
  };
  add("no regions", remat::Plan(stages));
  add("every block", around_blocks(remat::Plan(blocks, every_block)));
  const int64_t little =
      std::max(frontier.points().front().bytes, all[1].predicted.peak_bytes * 2 / 3);
  add("nested", frontier.plan(little));
  for (const int64_t segments : {4, 5, 6})
    add("sequential " + std::to_string(segments),
        around_blocks(remat::torch_sequential_plan(blocks, segments)));
  add("for the budget", fitted.plan());
  return all;
}

// Runs each plan in turn. Returns whether all gradients are those of the first one, bit by bit.
bool execute(std::vector<Candidate>& plans, CharTransformer& model,
             const std::vector<remat::Stage>& stages, const torch::Tensor& ids, int64_t repeats,
             const Target& target) {
  remat::MemoryMeter meter(target.device);
  std::vector<torch::Tensor> plain;
  bool equal = true;
  for (Candidate& each : plans) {
    step(model, stages, each.plan, ids, target);
    meter.reset_peak();
    const int64_t before = meter.live_bytes();
    step(model, stages, each.plan, ids, target);
    each.peak_bytes = meter.peak_bytes() - before;
    const std::vector<torch::Tensor> parameters = model->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (plain.size() == i)
        plain.push_back(parameters[i].grad().clone());
      else
        equal = equal && torch::equal(parameters[i].grad(), plain[i]);
    }
  }
  for (int64_t i = 0; i < repeats; ++i)
    for (Candidate& each : plans)
      each.seconds.push_back(step(model, stages, each.plan, ids, target));
  return equal;
}

// Prints the table. Returns whether every predicted peak is within 2 % of the measured one.
bool print_table(const std::vector<Candidate>& plans, double plain_seconds) {
  std::printf("\n%-16s %12s %12s %9s %14s %12s %7s %6s\n", "plan", "peak [MB]", "predicted", "",
              "time of a step", "predicted", "regions", "depth");
  bool is_exact = true;
  const double measured_plain = plans.front().least_seconds();
  for (const Candidate& each : plans) {
    const double ratio =
        static_cast<double>(each.peak_bytes) / static_cast<double>(each.predicted.peak_bytes);
    is_exact = is_exact && std::abs(ratio - 1) <= 0.02;
    std::printf("%-16s %12.2f %12.2f %8.2f%% %7.3f s %.2fx %11.2fx %7lld %6lld\n",
                each.name.c_str(), megabytes(each.peak_bytes), megabytes(each.predicted.peak_bytes),
                100 * (ratio - 1), each.least_seconds(), each.least_seconds() / measured_plain,
                (plain_seconds + each.predicted.extra_s) / plain_seconds,
                static_cast<long long>(each.predicted.frames),
                static_cast<long long>(each.predicted.depth));
  }
  return is_exact;
}

void draw(const remat::Frontier& frontier, const std::vector<Candidate>& plans,
          double plain_seconds, int64_t budget, const std::string& path, int64_t blocks) {
  std::vector<PlanPoint> curve, runs;
  for (const remat::FrontierPoint& point : frontier.points())
    curve.push_back({"", megabytes(point.bytes), (plain_seconds + point.extra_s) / plain_seconds});
  const double measured_plain = plans.front().least_seconds();
  for (const Candidate& each : plans)
    runs.push_back({each.name, megabytes(each.peak_bytes), each.least_seconds() / measured_plain,
                    &each == &plans.back()});
  frontier_picture("Memory and time of training " + std::to_string(blocks) + " transformer blocks",
                   curve, runs, megabytes(budget))
      .write(path);
}

// Returns the peak of the allocations of `work`, beyond the bytes alive before.
template <class Work>
int64_t peak_of(const Work& work, const torch::Device& device) {
  work();  // a first run allocates memory that stays
  remat::MemoryMeter meter(device);
  const int64_t before = meter.live_bytes();
  meter.reset_peak();
  work();
  return meter.peak_bytes() - before;
}

// Trains a few steps. Returns false if an allocation did not fit under the limit.
bool trains(const remat::Stage& loss_of, torch::Tensor& targets, const Text& text,
            const Options& options, torch::optim::Adam& optimizer, int64_t budget) {
  std::mt19937 random(kSeed);
  try {
    for (int64_t i = 0; i < options.steps; ++i) {
      const Batch batch = text.training_batch(options.batch_size, random).to(options.target.device);
      targets = batch.targets;
      optimizer.zero_grad(/*set_to_none=*/false);
      double loss = 0;
      {
        const torch::Device device = options.target.device;
        const remat::MemoryLimitGuard limit(remat::MemoryMeter(device).live_bytes() + budget,
                                            device);
        const torch::Tensor result = loss_of(batch.inputs);
        loss = result.item<double>();
        result.backward();
      }
      optimizer.step();
      std::printf("  step %lld, loss %.4f\n", static_cast<long long>(i + 1), loss);
    }
    return true;
  } catch (const c10::OutOfMemoryError&) {
    std::printf("  an allocation did not fit\n");
    return false;
  }
}

int run(const Options& options) {
  std::filesystem::create_directories(options.out);       // an error here comes before the work
  const remat::MemoryMeter meter(options.target.device);  // before the tensors that it counts
  const Text text(options.text, options.model.context);
  ModelOptions shape = options.model;
  shape.vocabulary = text.vocabulary();
  torch::manual_seed(kSeed);
  CharTransformer model(shape, Checkpointing::None);
  model->to(options.target.device);
  // Gradients exist from here on, so no budget counts them.
  for (torch::Tensor& each : model->parameters()) each.mutable_grad() = torch::zeros_like(each);
  std::mt19937 random(kSeed);
  const Batch batch = text.training_batch(options.batch_size, random).to(options.target.device);
  // The last stage, the loss, reads the targets of the present batch.
  torch::Tensor targets = batch.targets;
  std::vector<remat::Stage> stages = model->stages();
  stages.push_back([&targets](const torch::Tensor& scores) {
    return torch::cross_entropy_loss(scores.flatten(0, 1), targets.flatten());
  });
  // Autocast is around each stage by itself, so that each is measured as it runs.
  for (remat::Stage& stage : stages)
    stage = [stage, target = options.target](const torch::Tensor& x) {
      const Autocast autocast(target);
      return stage(x);
    };

  // The peak of a step without regions, run once.
  const remat::Plan none(static_cast<int64_t>(stages.size()));
  const int64_t keep_all = peak_of([&] { step(model, stages, none, batch.inputs, options.target); },
                                   options.target.device);
  int64_t budget = options.budget_mb ? std::llround(*options.budget_mb * 1e6) : keep_all / 4;
  if (options.takes_free)
    budget = remat::free_budget(remat::measure(stages, batch.inputs), options.target.device);

  // The whole of planning: measure, solve, choose, verify.
  const remat::Fitted fitted = remat::fit(stages, batch.inputs, budget);
  const remat::ChainCost cost = fitted.cost();
  const remat::Frontier frontier = fitted.frontier();

  double plain_seconds = 0;
  for (const remat::StageCost& each : cost.stages)
    plain_seconds += each.forward_s + each.backward_s;
  const remat::StageCost& block = cost.stages[static_cast<std::size_t>(shape.blocks / 2)];
  std::printf("%lld blocks of width %lld, batches of %lld x %lld characters, %d threads; %s.\n",
              static_cast<long long>(shape.blocks), static_cast<long long>(shape.width),
              static_cast<long long>(options.batch_size), static_cast<long long>(shape.context),
              torch::get_num_threads(), options.target.name().c_str());
  if (cost.rounding > 0)
    std::printf("The device's allocator takes %.2f %% more than is asked for.\n",
                100 * cost.rounding);
  std::printf("A block: forward %.2f ms, backward %.2f ms, output %.2f MB, saves %.2f MB.\n",
              1e3 * block.forward_s, 1e3 * block.backward_s, megabytes(block.output_bytes),
              megabytes(block.saved_bytes));
  std::printf("Frontier: %zu plans, from %.2f MB to %.2f MB.\n", frontier.points().size(),
              megabytes(frontier.points().front().bytes), megabytes(keep_all));
  std::printf("Budget %.2f MB:\n\n%s", megabytes(budget), fitted.table().c_str());
  std::fflush(stdout);

  std::vector<Candidate> plans = candidates(fitted, shape.blocks);
  const bool equal = execute(plans, model, stages, batch.inputs, options.repeats, options.target);
  const bool is_exact = print_table(plans, plain_seconds);
  const bool must_equal = options.target.is_reproducible();
  std::printf("Gradients of all plans: %s.\n",
              equal        ? "bit-equal"
              : must_equal ? "FAILED, they differ"
                           : "not bit-equal, as kernels of the device may add in another order");
  if (!is_exact) std::printf("FAILED: a peak was predicted with more than 2 %% of error.\n");

  const std::string path = (std::filesystem::path(options.out) / "budget.svg").string();
  draw(frontier, plans, plain_seconds, budget, path, shape.blocks);
  std::printf("The frontier, with these plans: %s\n\n", path.c_str());

  // Optimizer state does not count as activations: one step makes it before the limit is set.
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-3));
  optimizer.step();
  // A budget counts requested bytes. The bytes that a device's allocator adds are measured over all
  // peaks; a single peak may have twice that share.
  const auto limit =
      budget + static_cast<int64_t>(std::ceil(2 * cost.rounding * static_cast<double>(budget)));
  std::printf("Training with a limit of %.2f MB over what is alive:\n", megabytes(limit));
  const bool fits = trains(fitted, targets, text, options, optimizer, limit);
  if (!fits) std::printf("FAILED: the plan does not keep its budget.\n");
  bool plain_fits = false;
  if (budget < keep_all) {
    std::printf("The same without regions:\n");
    const remat::Stage without = [&](const torch::Tensor& x) {
      return remat::run(none, stages, x);
    };
    plain_fits = trains(without, targets, text, options, optimizer, limit);
    if (plain_fits) std::printf("FAILED: that should not fit.\n");
  }
  return (equal || !must_equal) && is_exact && fits && !plain_fits ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  return run_example("budget", kUsage, argc, argv, [&] { return run(parse(argc, argv)); });
}
