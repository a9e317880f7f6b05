// A mixture of experts whose routing flips in the recompute, and how remat::pin cures it.
//
// Each token goes to the expert with the highest score. Two experts score nearly the same here, and
// the scores are rounded differently each time, as by a nondeterministic kernel. A recompute then
// sends some tokens to other experts, which get batches of other sizes than in forward. remat
// detects this and throws. With the routing pinned, the recompute uses forward's routing.
//
// Exit status: 0 if everything happened as described, 1 if not, 2 if it was called wrongly.

#include <torch/torch.h>

#include <cstdio>
#include <string>
#include <vector>

#include "command_line.h"
#include "remat/remat.h"
#include "target.h"

namespace {

constexpr const char* kUsage =
    "usage: moe_routing [--device NAME] [--dtype NAME]\n" REMAT_TARGET_USAGE;

constexpr int64_t tokens = 512, width = 32, experts = 4;

// x * w, each column summed in an order that differs from call to call, as atomics on a GPU do.
torch::Tensor scores_in_some_order(const torch::Tensor& x, const torch::Tensor& w) {
  static int64_t calls = 0;
  ++calls;
  std::vector<torch::Tensor> columns;
  for (int64_t expert = 0; expert < w.size(1); ++expert) {
    torch::Tensor sum = torch::zeros({x.size(0)}, x.options());
    for (int64_t i = 0; i < width; ++i) {
      const int64_t k = (7 * i + 3 * calls + 5 * expert) % width;
      sum = sum + x.select(1, k) * w.index({k, expert});
    }
    columns.push_back(sum);
  }
  return torch::stack(columns, 1);
}

struct MixtureImpl : torch::nn::Module {
  explicit MixtureImpl(bool pins) : pins_(pins) {
    gate = register_parameter("gate", torch::randn({width, experts}));
    // The scores of experts 0 and 1 differ by rounding only.
    torch::NoGradGuard no_grad;
    gate.select(1, 1).copy_(gate.select(1, 0));
    for (int64_t i = 0; i < experts; ++i)
      layers.push_back(
          register_module("expert" + std::to_string(i), torch::nn::Linear(width, width)));
  }

  // (tokens, width) -> (tokens, width)
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor scores = scores_in_some_order(x, gate);
    torch::Tensor choice = scores.argmax(1);
    if (pins_) choice = remat::pin(choice);
    torch::Tensor result = torch::zeros_like(x);
    for (int64_t i = 0; i < experts; ++i) {
      const torch::Tensor mine = (choice == i).nonzero().squeeze(1);
      const torch::Tensor weight = scores.softmax(1).index_select(0, mine).select(1, i);
      const torch::Tensor out = layers[i](x.index_select(0, mine)).relu() * weight.unsqueeze(1);
      result = result.index_add(0, mine, out);
    }
    return result;
  }

  bool pins_;
  torch::Tensor gate;
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Mixture);

// Runs one step. Prints and returns whether backward succeeded.
bool steps(const char* name, bool pins, const Target& target) {
  torch::manual_seed(5);
  Mixture mixture(pins);
  mixture->to(target.device);
  const torch::Tensor x = torch::randn({tokens, width}).to(target.device).requires_grad_();
  const torch::Tensor y = [&] {
    const Autocast autocast(target);
    return remat::checkpoint({.name = "mixture"}, mixture, x);
  }();
  try {
    y.square().mean().backward();
  } catch (const remat::CheckpointError& error) {
    std::printf("%s: backward throws:\n\n%s\n", name, error.what_without_backtrace());
    return false;
  }
  std::printf("%s: backward works; |grad of the gate| = %.6f\n", name,
              mixture->gate.grad().norm().item<double>());
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  return run_example("moe_routing", kUsage, argc, argv, [&] {
    Target target;
    parse_options(argc, argv, [&](const std::string& name, const auto& value) {
      return target.take(name, value);
    });
    const bool plain_works = steps("routing computed again", false, target);
    const bool pinned_works = steps("routing pinned", true, target);
    return !plain_works && pinned_works ? 0 : 1;
  });
}
