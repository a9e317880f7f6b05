// Compares plans that may move saved tensors with plans that only recompute: the time of a step at
// equal budgets. See METHOD.md.

#include <remat/plan.h>
#include <torch/torch.h>

#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bench/arguments.h"
#include "bench/measure.h"
#include "bench/rounds.h"
#include "examples/char_transformer/model.h"
#include "examples/unet/model.h"

namespace {

using remat::ChainCost;
using remat::Frontier;
using remat::Plan;
using torch::Tensor;

/// A chain of stages with a loss that needs no targets.
class Chain {
 public:
  Chain(std::shared_ptr<torch::nn::Module> model, std::vector<remat::Stage> stages, Tensor input,
        remat::MoveOptions moving)
      : moving(std::move(moving)),
        model_(std::move(model)),
        input_(std::move(input)),
        stages_(std::move(stages)) {
    for (Tensor& each : model_->parameters()) each.mutable_grad() = torch::zeros_like(each);
  }

  const std::vector<remat::Stage>& stages() const { return stages_; }
  const Tensor& input() const { return input_; }

  void step(const Plan& plan) {
    model_->zero_grad(/*set_to_none=*/false);
    remat::run(plan, stages_, input_, {}, moving).backward();
  }
  std::vector<Tensor> gradients(const Plan& plan) {
    torch::manual_seed(2);
    step(plan);
    std::vector<Tensor> all;
    for (const Tensor& each : model_->parameters()) all.push_back(each.grad().clone());
    return all;
  }
  int64_t peak_bytes(const Plan& plan) {
    remat::MemoryMeter meter(input_.device());
    const int64_t before = meter.live_bytes();
    meter.reset_peak();
    step(plan);
    return meter.peak_bytes() - before;
  }

  const remat::MoveOptions moving;

 private:
  std::shared_ptr<torch::nn::Module> model_;
  const Tensor input_;
  std::vector<remat::Stage> stages_;
};

Chain demo(double dropout, bool smoke, const at::Device& device, remat::MoveOptions moving) {
  ModelOptions options;
  options.vocabulary = 65, options.dropout = dropout;
  int64_t batch = 8;
  if (smoke) options.blocks = 3, options.context = 16, options.width = 32, batch = 2;
  CharTransformer model(options, Checkpointing::None);
  model->to(device);
  std::vector<remat::Stage> stages = model->stages();
  stages.emplace_back([](const Tensor& scores) { return scores.logsumexp(-1).mean(); });
  const Tensor ids =
      torch::randint(options.vocabulary, {batch, options.context}, torch::kLong).to(device);
  return {model.ptr(), std::move(stages), ids, std::move(moving)};
}

/// The tensors between two stages of a U-Net: those that wait for the way up, and last the picture.
using Parts = std::vector<Tensor>;

/// Returns the parts as one tensor, which a stage takes and returns.
Tensor packed(const Parts& parts) {
  if (parts.size() == 1) return parts.front();
  Parts flat;
  for (const Tensor& each : parts) flat.push_back(each.flatten());
  return torch::cat(flat);
}
Parts unpacked(const Tensor& flat, const std::vector<std::vector<int64_t>>& shapes) {
  if (shapes.size() == 1) return {flat};
  std::vector<int64_t> sizes;
  for (const auto& shape : shapes)
    sizes.push_back(std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()));
  Parts parts = flat.split_with_sizes(sizes);
  for (std::size_t i = 0; i < parts.size(); ++i) parts[i] = parts[i].view(shapes[i]);
  return parts;
}

/// Three levels of the example's blocks, each block two stages.
Chain u_net(bool smoke, const at::Device& device, remat::MoveOptions moving) {
  const int64_t batch = smoke ? 1 : 4, side = smoke ? 8 : 96, width = smoke ? 4 : 24;
  const auto model = std::make_shared<torch::nn::Module>("u_net");
  const Tensor input = torch::randn({batch, 3, side, side}).to(device);
  std::vector<remat::Stage> stages;
  Parts now{input};  // the input of the next stage
  const auto add = [&](const std::function<void(Parts&)>& work) {
    std::vector<std::vector<int64_t>> shapes;
    for (const Tensor& each : now) shapes.push_back(each.sizes().vec());
    stages.emplace_back([work, shapes](const Tensor& flat) {
      Parts parts = unpacked(flat, shapes);
      work(parts);
      return packed(parts);
    });
    const torch::NoGradGuard no_grad;
    work(now);
  };
  const auto add_block = [&](int64_t to, const std::function<void(Parts&)>& prepare) {
    Parts prepared = now;
    prepare(prepared);
    const auto block =
        std::make_shared<unet::BlockImpl>(prepared.back().size(1), to, unet::Norm::Instance);
    model->register_module("block" + std::to_string(stages.size()), block);
    static_cast<torch::nn::Module&>(*block).to(device);  // a block has a member of that name
    // Convolution, norm and activation.
    const auto run = [block](Parts& parts, int64_t first) {
      for (auto layer = block->layers->begin() + first; layer != block->layers->begin() + first + 3;
           ++layer)
        parts.back() = layer->forward(parts.back());
    };
    add([=](Parts& parts) {
      prepare(parts);
      run(parts, 0);
    });
    add([=](Parts& parts) { run(parts, 3); });
  };
  const auto down = [](Parts& parts) { parts.push_back(torch::max_pool2d(parts.back(), 2)); };
  const auto up = [](Parts& parts) {
    const Tensor below = parts.back();
    parts.pop_back();
    const Tensor beside = parts.back();
    parts.back() =
        torch::cat({beside, torch::upsample_nearest2d(below, {beside.size(2), beside.size(3)})}, 1);
  };
  add_block(width, [](Parts&) {});
  add_block(2 * width, down);
  add_block(4 * width, down);
  add_block(2 * width, up);
  add_block(width, up);
  stages.emplace_back([](const Tensor& picture) { return picture.square().mean(); });
  return {model, std::move(stages), input, std::move(moving)};
}

struct Candidate {
  std::string name;
  Plan plan;
  int64_t budget = 0;
  remat::Simulation predicted{};
  int64_t peak_bytes = 0;
};

void run_with(const bench::Arguments& arguments, const char* model, Chain chain) {
  const ChainCost cost = remat::measure(
      chain.stages(), chain.input(), {.repeats = arguments.smoke ? 1 : 7, .moving = chain.moving});
  ChainCost without = cost;
  without.moving.reset();
  double plain_s = 0;
  for (const remat::StageCost& each : cost.stages) plain_s += each.forward_s + each.backward_s;
  if (!cost.moving) throw std::runtime_error("WRONG: nothing can move.");
  std::fprintf(stderr, "copies: %.3f ms a MB there, %.3f back; held up: %.2f of that\n",
               1e9 * cost.moving->store_s_per_byte, 1e9 * cost.moving->load_s_per_byte,
               cost.moving->held_up_share);
  const Frontier regions = remat::solve(without), moves = remat::solve(cost);
  const int64_t least = regions.points().front().bytes, most = regions.points().back().bytes;

  std::vector<Candidate> all{{"no regions", Plan(static_cast<int64_t>(cost.stages.size())), most}};
  for (const int64_t percent : {25, 50, 75}) {
    const int64_t budget = least + (most - least) * percent / 100;
    const std::string share = std::to_string(percent) + " % of the span, ";
    all.push_back({share + "regions", regions.plan(budget), budget});
    all.push_back({share + "moving", moves.plan(budget), budget});
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
    const std::size_t beside = i == 0 ? 0 : i - (i - 1) % 2;  // the plan of regions for that budget
    const double of_regions = result.min_ns / cells[beside].result().min_ns;
    bench::print_json(
        "plan_moving", bench::text("\"model\": \"%s\", \"plan\": \"%s\"", model, each.name.c_str()),
        arguments, result,
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
  const bench::Arguments arguments =
      bench::parse(argc, argv, {{"--directory PATH", &directory}}, bench::RunsOn::AnyDevice);
  const at::Device device = arguments.device;
  const remat::MemoryMeter first(device);  // before the tensors that it counts
  remat::MoveOptions moving{.directory = directory};
  if (arguments.smoke) moving.min_bytes = 0;
  torch::manual_seed(1);
  run_with(arguments, "the demo's model", demo(0.1, arguments.smoke, device, moving));
  torch::manual_seed(1);
  run_with(arguments, "the demo's model, no dropout", demo(0, arguments.smoke, device, moving));
  torch::manual_seed(1);
  run_with(arguments, "a U-Net", u_net(arguments.smoke, device, moving));
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::main_of(run, argc, argv); }
