// Measures a checkpointed training step of a real model over (plain step + one forward). See
// METHOD.md.

#include <cstdio>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/arguments.h"
#include "bench/measure.h"
#include "bench/resnet.h"
#include "bench/rounds.h"
#include "examples/char_transformer/model.h"

namespace {

using torch::Tensor;

/// One model in one of its modes, with a fixed batch.
struct Step {
  const char* name;
  std::shared_ptr<torch::nn::Module> model;
  std::function<Tensor()> loss;

  void run() const {
    model->zero_grad(/*set_to_none=*/false);
    loss().backward();
  }
};

/// Modes of one model; the first is the plain one.
struct Comparison {
  const char* model;
  std::vector<Step> steps;
};

Comparison transformer(bool smoke, const torch::Device& device) {
  ModelOptions options;
  options.vocabulary = 64;
  if (smoke) options.blocks = 4, options.context = 16, options.width = 32;
  const Tensor ids =
      torch::randint(options.vocabulary, {8, options.context + 1}, torch::kLong).to(device);
  const auto step = [&](const char* name, Checkpointing mode) {
    torch::manual_seed(1);
    CharTransformer model(options, mode);
    model->to(device);
    return Step{name, model.ptr(), [model, ids]() mutable {
                  const int64_t length = ids.size(1) - 1;
                  return model->loss(ids.narrow(1, 0, length), ids.narrow(1, 1, length));
                }};
  };
  return {"the demo's model",
          {step("plain step", Checkpointing::None),
           step("every block checkpointed", Checkpointing::EveryBlock),
           step("nested groups of blocks", Checkpointing::NestedGroups)}};
}

Comparison resnet(bool smoke, const torch::Device& device) {
  bench::ResNetOptions options;
  if (smoke) options.blocks = 1, options.width = 4;
  const Tensor pictures =
      (smoke ? torch::rand({2, 3, 8, 8}) : torch::rand({16, 3, 32, 32})).to(device);
  const Tensor classes =
      torch::randint(options.classes, {pictures.size(0)}, torch::kLong).to(device);
  const auto step = [&](const char* name, bool is_checkpointed) {
    torch::manual_seed(1);
    bench::ResNet model(options, is_checkpointed);
    model->to(device);
    return Step{name, model.ptr(),
                [model, pictures, classes]() mutable { return model->loss(pictures, classes); }};
  };
  return {"a residual network",
          {step("plain step", false), step("every block checkpointed", true)}};
}

/// Returns gradients and running statistics after two steps with the same random numbers.
std::vector<Tensor> state_of(const Step& step) {
  torch::manual_seed(2);
  step.run();
  step.run();
  std::vector<Tensor> all;
  for (const Tensor& each : step.model->parameters()) all.push_back(each.grad().clone());
  for (const Tensor& each : step.model->buffers()) all.push_back(each.clone());
  return all;
}

void verify(const Comparison& comparison) {
  const std::vector<Tensor> expected = state_of(comparison.steps.front());
  for (const Step& step : comparison.steps) {
    if (&step != &comparison.steps.front())
      bench::require_plain(state_of(step), expected,
                           bench::text("%s, %s", comparison.model, step.name));
  }
}

void measure(const Comparison& comparison, const bench::Arguments& arguments) {
  const Step& plain = comparison.steps.front();
  std::vector<bench::Cell> cells;
  // One sample, not a sum of two: the second part uses memory that the first has freed, as a
  // checkpointed step does.
  cells.emplace_back([&] { plain.loss(), plain.run(); });
  for (const Step& step : comparison.steps) cells.emplace_back([&] { step.run(); });
  bench::measure(cells, arguments);

  const bench::Statistics limit = cells[0].result();
  std::fprintf(
      stderr, "%-48s %9s %12s %11s %12s %12s\n",
      bench::text("step of %s, threads: %d", comparison.model, at::get_num_threads()).c_str(),
      "min [ms]", "of plain+fwd", "of medians", "peak bytes", "held bytes");
  const bench::StepBytes plain_bytes = bench::bytes_of(plain.loss, arguments.device);
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const char* const name =
        i == 0 ? "one forward, then a plain step" : comparison.steps[i - 1].name;
    const bench::StepBytes bytes =
        i == 0 ? bench::StepBytes{}
               : bench::bytes_of(comparison.steps[i - 1].loss, arguments.device);
    const auto peak = static_cast<long long>(bytes.peak), held = static_cast<long long>(bytes.held);
    if (i > 1 && bytes.peak >= plain_bytes.peak)
      throw std::runtime_error(std::string("WRONG: no bytes are saved: ") + name);
    const bench::Statistics result = cells[i].result();
    const double of_ideal = result.min_ns / limit.min_ns;
    bench::print_json(
        "step_cost", bench::text("\"model\": \"%s\", \"step\": \"%s\"", comparison.model, name),
        arguments, result,
        bench::text("\"of_plain_and_forward\": %.4f, \"peak_bytes\": %lld, \"held_bytes\": %lld",
                    of_ideal, peak, held) +
            (arguments.device.is_cpu() ? "" : ", " + cells[i].host_json(arguments)));
    std::fprintf(stderr, "%-48s %9.1f %12.3f %11.3f", name, result.min_ns / 1e6, of_ideal,
                 result.median_ns / limit.median_ns);
    if (i > 0) std::fprintf(stderr, " %12lld %12lld", peak, held);
    std::fprintf(stderr, "\n");
  }
}

int run(int argc, char** argv) {
  std::string threads;
  const bench::Arguments arguments =
      bench::parse(argc, argv, {{"--threads N", &threads}}, bench::RunsOn::AnyDevice);
  std::vector<int> counts{1};
  if (!threads.empty())
    counts = {std::stoi(threads)};
  else if (arguments.device.is_cpu())
    counts = {1, 2};
  const remat::MemoryMeter first(arguments.device);  // before the tensors that it counts
  for (const auto& make : {transformer, resnet})
    for (const int count : counts) {
      at::set_num_threads(count);
      // Each count gets models of its own: running statistics of timed models have seen different
      // numbers of steps.
      const Comparison comparison = make(arguments.smoke, arguments.device);
      verify(comparison);
      if (arguments.smoke) continue;
      // The calling thread's own time does not measure a step on several threads.
      bench::Arguments of_count = arguments;
      if (count > 1) of_count.clock = bench::Clock::Wall;
      measure(comparison, of_count);
    }
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::main_of(run, argc, argv); }
