// The program of docs/tutorial.md: a training loop that does not fit into memory, and ways to make
// it fit. Prints the texts that the page shows.
//
//     tutorial [STEP...]    these steps of the page; without a name all, in the order of the page

#include <remat/remat.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "command_line.h"

using torch::Tensor;

namespace {

constexpr int64_t kLimit = 16'000'000;  // [bytes]

// ---- a training loop

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : norm(register_module("norm", torch::nn::LayerNorm(std::vector<int64_t>{width}))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}

  Tensor forward(const Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }

  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

using Blocks = std::vector<Block>;

Tensor run_blocks(Blocks blocks, Tensor x) {
  for (Block& block : blocks) x = block(x);
  return x;
}

// A model of 16 blocks. The steps replace `run`.
struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    for (int i = 0; i < 16; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Block(32)));
  }

  Tensor forward(const Tensor& x) { return run(blocks, x); }

  Blocks blocks;
  std::function<Tensor(Blocks, Tensor)> run = run_blocks;
};
TORCH_MODULE(Model);

// Three batches: inputs (1024, 32) and targets of the same shape.
const std::vector<std::pair<Tensor, Tensor>>& loader() {
  static const auto batches = [] {
    torch::manual_seed(1);
    std::vector<std::pair<Tensor, Tensor>> made;
    for (int i = 0; i < 3; ++i) {
      const Tensor x = torch::randn({1024, 32});
      made.emplace_back(x, x.sin());
    }
    return made;
  }();
  return batches;
}

float train(Model& model) {
  torch::optim::SGD optimizer(model->parameters(), /*lr=*/1.0);
  Tensor loss;
  for (const auto& [x, y] : loader()) {
    optimizer.zero_grad();
    loss = torch::mse_loss(model(x), y);
    loss.backward();
    optimizer.step();
  }
  return loss.item<float>();
}

// ---- what the steps share

Model new_model() {
  torch::manual_seed(0);
  return Model();
}

// The parameters after a training without remat.
const std::vector<Tensor>& plain_parameters() {
  static const std::vector<Tensor> parameters = [] {
    Model model = new_model();
    train(model);
    model->zero_grad();
    return model->parameters();
  }();
  return parameters;
}

double megabytes(int64_t bytes) { return static_cast<double>(bytes) / 1e6; }

// Prints a text with two columns of margin, in lines of at most 98 characters.
void print_wrapped(const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string row = " ";
    for (std::string word; words >> word; row += " " + word) {
      if (row.size() + 1 + word.size() <= 98) continue;
      std::printf("%s\n", row.c_str());
      row = " ";
    }
    std::printf("%s\n", row.c_str());
  }
}

// Trains the model under the limit, and prints the loss and the peak.
void train_under_limit(Model& model) {
  remat::MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  const remat::MemoryLimitGuard limit(before + kLimit);
  const float loss = train(model);
  const int64_t peak = meter.peak_bytes() - before;
  const std::vector<Tensor> parameters = model->parameters();
  const bool equal =
      std::equal(parameters.begin(), parameters.end(), plain_parameters().begin(), torch::equal);
  std::printf("  loss %.3f, peak %.2f MB, parameters bit-equal: %s\n", loss, megabytes(peak),
              equal ? "yes" : "no");
}

// The same with the blocks run by `run`; also prints the counts of the regions.
void train_with(Tensor run(Blocks, Tensor)) {
  Model model = new_model();
  model->run = run;
  const remat::Recorder recorder;
  train_under_limit(model);
  for (const remat::RegionReport& region : recorder.report().regions) {
    std::printf("  %s: %lld calls, %lld recomputes, %.2f MB dropped\n", region.name.c_str(),
                static_cast<long long>(region.calls), static_cast<long long>(region.recomputes),
                megabytes(region.bytes_dropped));
    for (const remat::DecisionReport& each : region.decisions)
      std::printf("    %s: %lld %s\n", each.op.c_str(), static_cast<long long>(each.calls),
                  each.outcome.c_str());
  }
}

// ---- the steps

void limit() {
  Model model = new_model();
  const remat::MemoryMeter meter;
  try {
    const remat::MemoryLimitGuard limit(meter.live_bytes() + kLimit);
    train(model);
  } catch (const c10::OutOfMemoryError& error) {
    print_wrapped(error.what_without_backtrace());
  }
}

void measure() {
  Model model = new_model();
  const remat::BudgetGuard no_limit({.bytes = INT64_MAX});
  train(model);
  const remat::BudgetReport report = no_limit.report();
  std::printf("  peak %.2f MB, floor %.2f MB\n", megabytes(report.peak_bytes),
              megabytes(report.floor_bytes));
}

void saved() {
  Block block(32);
  const Tensor y = block(loader()[0].first);
  std::map<std::string, int64_t> bytes_of;
  for (const remat::SavedTensorInfo& saved : remat::saved_tensors(y))
    if (!saved.shares_storage) bytes_of[saved.node] += saved.bytes;
  for (const auto& [node, bytes] : bytes_of)
    std::printf("  %s: %lld bytes\n", node.c_str(), static_cast<long long>(bytes));
}

void budget() {
  Model model = new_model();
  const remat::BudgetGuard budget({.bytes = kLimit});
  train_under_limit(model);
  print_wrapped(budget.report().to_string());
}

Tensor run_regions(Blocks blocks, Tensor x) {
  for (const Block& block : blocks) x = remat::checkpoint({.name = "block"}, block, x);
  return x;
}

Tensor run_nested(Blocks blocks, Tensor x) {
  for (auto first = blocks.begin(); first != blocks.end(); first += 4)
    x = remat::checkpoint({.name = "group"}, run_regions, Blocks(first, first + 4), x);
  return x;
}

Tensor run_with_policy(Blocks blocks, Tensor x) {
  for (const Block& block : blocks)
    x = remat::checkpoint({.name = "block", .policy = remat::save_matmuls()}, block, x);
  return x;
}

void plan() {
  Model model = new_model();
  const Tensor sample = loader()[0].first;
  const std::vector<remat::Stage> stages(model->blocks.begin(), model->blocks.end());
  const remat::Fitted fitted = remat::fit(stages, sample, /*budget_bytes=*/12'000'000);
  std::printf("  %s\n", fitted.plan().to_string().c_str());
  std::printf("  predicted peak %.2f MB, measured %.2f MB\n",
              megabytes(fitted.predicted().peak_bytes), megabytes(*fitted.measured_peak()));

  model->run = [fitted](const Blocks&, const Tensor& x) { return fitted(x); };
  train_under_limit(model);
}

// ---- mistakes

// Runs an action, and prints the error that it throws.
void print_error(const std::function<void()>& action) {
  try {
    action();
    std::printf("  no error\n");
  } catch (const c10::Error& error) {
    print_wrapped(error.what_without_backtrace());
  }
}

Tensor input() { return torch::ones({1024, 32}).requires_grad_(); }

void captures_a_tensor_that_changes() {
  Block block(32);
  Tensor scale = torch::ones({});
  const Tensor x = input();
  print_error([&] {
    const auto scaled = [=](const Tensor& t) mutable { return block(t * scale); };
    const Tensor y = remat::checkpoint({.name = "scaled"}, scaled, x);
    scale.mul_(0.9);  // before backward
    y.sum().backward();
  });
  print_error([&] {
    const auto scaled = [=](const Tensor& t) mutable { return block(t * scale); };
    const Tensor y = remat::checkpoint({.name = "scaled"}, scaled, x);
    scale = scale * 0.9;  // a new tensor
    y.sum().backward();
  });
}

void takes_another_path() {
  Block block(32);
  const Tensor x = input();
  std::mt19937 random;
  print_error([&] {
    const auto skips = [&, block](const Tensor& t) mutable {
      return random() < (1U << 31) ? t : block(t);  // stochastic depth
    };
    remat::checkpoint({.name = "skips"}, skips, x).sum().backward();
  });
  print_error([&] {
    const auto skips = [block](const Tensor& t) mutable {
      return torch::rand({}).item<float>() < 0.5F ? t : block(t);
    };
    remat::checkpoint({.name = "skips"}, skips, x).sum().backward();
  });
}

void writes_to_its_argument() {
  Block block(32);
  const Tensor x = input();
  const auto relu_first = [block](Tensor t) mutable { return block(t.relu_()); };
  const auto run = [&](const remat::CheckpointOptions& options) {
    remat::checkpoint(options, relu_first, block(x)).sum().backward();
  };
  print_error([&] { run({.name = "relu first"}); });
  print_error([&] { run({.name = "relu first", .inputs = remat::InputMode::CopyOnWrite}); });
}

void budget_below_the_floor() {
  Model model = new_model();
  print_error([&] {
    const remat::BudgetGuard budget({.bytes = 1'000'000, .over = remat::OverBudget::Throw});
    train(model);
  });
}

const std::vector<std::pair<std::string, std::function<void()>>> kSteps{
    {"limit", limit},
    {"measure", measure},
    {"saved", saved},
    {"budget", budget},
    {"regions", [] { train_with(run_regions); }},
    {"nested", [] { train_with(run_nested); }},
    {"policy", [] { train_with(run_with_policy); }},
    {"plan", plan},
    {"capture", captures_a_tensor_that_changes},
    {"path", takes_another_path},
    {"argument", writes_to_its_argument},
    {"floor", budget_below_the_floor},
};

int run(const std::vector<std::string>& asked) {
  for (const std::string& name : asked)
    if (std::none_of(kSteps.begin(), kSteps.end(), [&](auto& step) { return step.first == name; }))
      throw UsageError("there is no step '" + name + "'");
  torch::set_num_threads(1);  // some kernels allocate memory for each thread
  plain_parameters();
  for (const auto& [name, step] : kSteps) {
    if (!asked.empty() && std::find(asked.begin(), asked.end(), name) == asked.end()) continue;
    std::printf("%s\n", name.c_str());
    step();
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::string usage = "usage: tutorial [STEP...]\nsteps:";
  for (const auto& step : kSteps) usage += " " + step.first;
  return run_example("tutorial", usage + "\n", argc, argv,
                     [&] { return run({argv + 1, argv + argc}); });
}
