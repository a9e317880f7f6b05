// Measures bytes and time of a step for several policies, from those that keep nothing to those
// that keep everything. See METHOD.md.

#include <remat/policy.h>
#include <torch/torch.h>

#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/arguments.h"
#include "bench/measure.h"
#include "bench/rounds.h"
#include "examples/char_transformer/model.h"

namespace {

using torch::Tensor;

struct Choice {
  const char* name;
  /// Empty: no regions.
  std::optional<remat::Policy> policy;
};

std::vector<Choice> choices() {
  const remat::Policy everything = [](const remat::PolicyContext&) {
    return remat::CheckpointPolicy::MustSave;
  };
  return {{"plain autograd", std::nullopt},
          {"nothing", remat::Policy()},
          {"save_names, attention", remat::save_names({"attention"})},
          {"save_ops, attention",
           remat::save_ops({"aten::_scaled_dot_product_flash_attention_for_cpu"})},
          {"save_ops, linear layers", remat::save_ops({"aten::mm"})},
          {"save_matmuls", remat::save_matmuls()},
          {"everything", everything}};
}

/// The blocks of the demo's model, each a region, with one policy for all.
class Stack {
 public:
  Stack(const ModelOptions& options, const Tensor& input) : input_(input) {
    for (int64_t i = 0; i < options.blocks; ++i) blocks_.emplace_back(options)->to(input.device());
  }

  Tensor forward(const Choice& choice) {
    Tensor y = input_;
    for (const Block& block : blocks_)
      y = choice.policy ? remat::checkpoint({.policy = *choice.policy}, block, y) : Block(block)(y);
    return y.square().mean();
  }

  void step(const Choice& choice) {
    for (Block& block : blocks_) block->zero_grad(/*set_to_none=*/false);
    forward(choice).backward();
  }

  std::vector<Tensor> gradients(const Choice& choice) {
    torch::manual_seed(2);
    step(choice);
    std::vector<Tensor> all;
    for (const Block& block : blocks_)
      for (const Tensor& each : block->parameters()) all.push_back(each.grad().clone());
    return all;
  }

 private:
  std::vector<Block> blocks_;
  Tensor input_;
};

int run(int argc, char** argv) {
  std::string threads = "1";
  const bench::Arguments arguments =
      bench::parse(argc, argv, {{"--threads N", &threads}}, bench::RunsOn::AnyDevice);
  at::set_num_threads(std::stoi(threads));
  torch::manual_seed(1);
  const remat::MemoryMeter first(arguments.device);  // before the tensors that it counts
  ModelOptions options;
  options.blocks = 6;
  int64_t batch = 8;
  if (arguments.smoke) options.blocks = 2, options.context = 16, options.width = 32, batch = 2;
  Stack stack(options, torch::randn({batch, options.context, options.width}).to(arguments.device));

  const std::vector<Choice> all = choices();
  const std::vector<Tensor> expected = stack.gradients(all.front());
  std::vector<bench::StepBytes> bytes;
  std::vector<bench::Cell> cells;
  for (const Choice& choice : all) {
    bench::require_plain(stack.gradients(choice), expected, choice.name);
    bytes.push_back(bench::bytes_of([&] { return stack.forward(choice); }, arguments.device));
    cells.emplace_back([&stack, &choice] { stack.step(choice); });
  }
  const bench::StepBytes plain = bytes[0], nothing = bytes[1], everything = bytes.back();
  // "everything" also keeps results that no formula reads.
  for (const bench::StepBytes& each : bytes)
    if (each.held < nothing.held || (each.held > plain.held && &each != &bytes.back()))
      throw std::runtime_error("WRONG: a policy holds less than none, or more than plain autograd");
  if (everything.held <= nothing.held)
    throw std::runtime_error("WRONG: to keep everything holds no more than to keep nothing");
  if (arguments.smoke) return 0;

  cells.emplace_back([&] { stack.forward(all.front()); });  // the least cost of a recompute
  bench::measure(cells, arguments);
  const bench::Statistics step = cells[0].result(), forward = cells.back().result();
  std::fprintf(stderr, "%-30s %10s %9s %11s %13s %8s %13s %8s\n", "what regions keep", "min [ms]",
               "of plain", "of medians", "peak bytes", "of plain", "held bytes", "of plain");
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const bench::Statistics result = cells[i].result();
    const bool is_step = i < all.size();
    const bench::StepBytes held = is_step ? bytes[i] : bench::StepBytes{};
    const auto peak_bytes = static_cast<long long>(held.peak);
    const auto held_bytes = static_cast<long long>(held.held);
    const char* const name = is_step ? all[i].name : "(one plain forward)";
    bench::print_json(
        "selective_curve", bench::text("\"keeps\": \"%s\"", name), arguments, result,
        bench::text("\"peak_bytes\": %lld, \"held_bytes\": %lld", peak_bytes, held_bytes));
    std::fprintf(stderr, "%-30s %10.2f %9.3f %11.3f", name, result.min_ns / 1e6,
                 result.min_ns / step.min_ns, result.median_ns / step.median_ns);
    if (is_step)
      std::fprintf(stderr, " %13lld %8.3f %13lld %8.3f", peak_bytes,
                   static_cast<double>(held.peak) / static_cast<double>(plain.peak), held_bytes,
                   static_cast<double>(held.held) / static_cast<double>(plain.held));
    std::fprintf(stderr, "\n");
  }
  std::fprintf(stderr, "to recompute all of it would be %.3f of plain\n",
               (step.min_ns + forward.min_ns) / step.min_ns);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::main_of(run, argc, argv); }
