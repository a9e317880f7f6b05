#pragma once
// A residual block with all parameters in one tensor.

#include <torch/torch.h>

#include <cmath>
#include <vector>

struct Block {
  int64_t width;

  // Returns all parameters of a block, (P). They are drawn on the CPU in float64, so all `target`
  // get the same.
  torch::Tensor initial(const torch::TensorOptions& target) const {
    const auto options = torch::TensorOptions(torch::kFloat64);
    const double scale = 1 / std::sqrt(static_cast<double>(width));
    return torch::cat({torch::ones({width}, options), torch::zeros({width}, options),
                       torch::randn({4 * width * width}, options) * scale,
                       torch::zeros({4 * width}, options),
                       torch::randn({4 * width * width}, options) * (scale / 2),
                       torch::zeros({width}, options)})
        .to(target);
  }

  // (P), (B, width) -> (B, width)
  torch::Tensor forward(const torch::Tensor& parameters, const torch::Tensor& x) const {
    // One split instead of several narrow(): its backward makes one gradient, not one for each
    // part.
    const std::vector<torch::Tensor> p = parameters.split_with_sizes(
        {width, width, 4 * width * width, 4 * width, 4 * width * width, width});
    const torch::Tensor normed = torch::layer_norm(x, {width}, p[0], p[1]);
    const torch::Tensor up = torch::linear(normed, p[2].view({4 * width, width}), p[3]);
    return x + torch::linear(torch::gelu(up), p[4].view({width, 4 * width}), p[5]);
  }
};
