// An attention with a gradient rule of its own, beside the generic recompute.
//
// The forward is LibTorch's fused kernel, which never holds the probabilities and returns the
// log-sum-exp of the scores, one number for each row. The rule rebuilds the probabilities from it
// in backward. A region around the plain attention recomputes scores and softmax instead, and holds
// the probabilities in forward, too.
//
// The program prints the bytes held after forward, the peak of forward, the peak of the step, and
// the time of forward and backward (the median of several rounds in which all three take turns).
//
// Exit status: 0 if first and second derivatives agree with those of the plain attention, and the
// rule's forward needs less than a quarter of the plain one's peak; else 1.

#include <remat/remat.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <vector>

namespace {

using Tensors = std::vector<torch::Tensor>;

constexpr int64_t num_heads = 8, num_rows = 1024, width = 64;
constexpr int num_rounds = 7;

torch::Tensor scores_of(const torch::Tensor& q, const torch::Tensor& k) {
  return (q / std::sqrt(static_cast<double>(q.size(-1)))).matmul(k.transpose(-1, -2));
}

torch::Tensor attention(const Tensors& inputs) {
  return scores_of(inputs[0], inputs[1]).softmax(-1).matmul(inputs[2]);
}

// The same result from LibTorch's fused kernel, and the log-sum-exp of the scores. That kernel has
// no derivative of its sums, for which a second derivative asks with grad mode on.
remat::CustomRule::Result fused_attention(const Tensors& inputs) {
  if (at::GradMode::is_enabled())
    return {{attention(inputs)}, {scores_of(inputs[0], inputs[1]).logsumexp(-1, /*keepdim=*/true)}};
  const auto [result, sums] =
      at::_scaled_dot_product_flash_attention_for_cpu(inputs[0], inputs[1], inputs[2]);
  return {{result}, {sums.unsqueeze(-1)}};
}

const remat::CustomRule attention_rule{
    .forward = fused_attention,
    .rematerialize = [](const Tensors& small, const Tensors& inputs) -> Tensors {
      torch::Tensor probabilities = scores_of(inputs[0], inputs[1]).sub_(small[0]).exp_();
      return {inputs[0], inputs[1], inputs[2], probabilities};
    },
    .backward = [](const Tensors& saved, const Tensors& gradients) -> Tensors {
      const torch::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &p = saved[3];
      const double scale = 1 / std::sqrt(static_cast<double>(q.size(-1)));
      const torch::Tensor dp = gradients[0].matmul(v.transpose(-1, -2));
      const torch::Tensor ds = torch::_softmax_backward_data(dp, p, -1, p.scalar_type());
      return {ds.matmul(k * scale), ds.transpose(-1, -2).matmul(q * scale),
              p.transpose(-1, -2).matmul(gradients[0])};
    }};

Tensors new_inputs(int64_t heads, int64_t rows, torch::ScalarType dtype) {
  Tensors inputs;
  for (int i = 0; i < 3; ++i)
    inputs.push_back(torch::randn({1, heads, rows, width}, torch::dtype(dtype)).requires_grad_());
  return inputs;
}

using Function = std::function<torch::Tensor(const Tensors&)>;

struct Way {
  const char* name;
  Function run;
  int64_t held = 0, forward_peak = 0, peak = 0;
  std::vector<double> seconds{};
  Tensors gradients{};
};

void measure(Way& way, const Tensors& inputs, const torch::Tensor& outer) {
  remat::MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  meter.reset_peak();
  const auto begin = std::chrono::steady_clock::now();
  const torch::Tensor y = way.run(inputs);
  way.held = meter.live_bytes() - before;
  way.forward_peak = meter.peak_bytes() - before;
  way.gradients = torch::autograd::grad({y}, inputs, {outer});
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  way.peak = meter.peak_bytes() - before;
  way.seconds.push_back(took.count());
}

bool agree(const Tensors& found, const Tensors& expected, double tolerance) {
  return std::equal(found.begin(), found.end(), expected.begin(),
                    [&](const torch::Tensor& a, const torch::Tensor& b) {
                      return torch::allclose(a, b, tolerance, tolerance);
                    });
}

// Gradients of a sum over first derivatives.
Tensors second_derivatives(const Function& run, const Tensors& inputs) {
  const auto first = torch::autograd::grad({run(inputs).sin().sum()}, inputs, {},
                                           /*retain_graph=*/true, /*create_graph=*/true);
  return torch::autograd::grad({(first[0] * first[1] * first[2]).sum()}, inputs);
}

}  // namespace

int main() {
  torch::manual_seed(0);
  const Tensors inputs = new_inputs(num_heads, num_rows, torch::kFloat);
  const torch::Tensor outer = torch::randn({1, num_heads, num_rows, width});
  const Function with_rule = [](const Tensors& t) {
    return remat::custom_function(attention_rule, t)[0];
  };
  std::vector<Way> ways{
      {"plain", attention},
      {"region", [](const Tensors& t) { return remat::checkpoint(attention, t); }},
      {"rule", with_rule}};
  for (int round = 0; round < num_rounds; ++round)
    for (Way& way : ways) measure(way, inputs, outer);

  std::printf("%-8s%14s%16s%14s%10s\n", "", "held [MB]", "forward [MB]", "peak [MB]", "[ms]");
  for (Way& way : ways) {
    std::nth_element(way.seconds.begin(), way.seconds.begin() + num_rounds / 2, way.seconds.end());
    std::printf("%-8s%14.2f%16.2f%14.2f%10.1f\n", way.name, static_cast<double>(way.held) / 1e6,
                static_cast<double>(way.forward_peak) / 1e6, static_cast<double>(way.peak) / 1e6,
                way.seconds[num_rounds / 2] * 1e3);
  }
  const Tensors small = new_inputs(2, 160, torch::kDouble);
  const bool is_right =
      agree(ways[2].gradients, ways[0].gradients, 1e-4) &&
      agree(second_derivatives(with_rule, small), second_derivatives(attention, small), 1e-8);
  std::printf("first and second derivatives agree: %s\n", is_right ? "yes" : "NO");
  return is_right && 4 * ways[2].forward_peak < ways[0].forward_peak ? 0 : 1;
}
