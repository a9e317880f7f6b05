#pragma once
// A small residual network for pictures, in the shape of ResNet-20, whose blocks can be regions.

#include <torch/torch.h>

#include <cstdint>

#include "remat/module.h"

namespace bench {

inline torch::nn::Conv2d convolution(int64_t in, int64_t out, int64_t size, int64_t stride) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(false));
}

/// Two convolutions with batch norms, and a shortcut around them. (B, in, H, W) -> (B, out, H', W')
class ResidualImpl : public torch::nn::Module {
 public:
  ResidualImpl(int64_t in, int64_t out, int64_t stride)
      : first_(register_module("first", convolution(in, out, 3, stride))),
        second_(register_module("second", convolution(out, out, 3, 1))),
        first_norm_(register_module("first_norm", torch::nn::BatchNorm2d(out))),
        second_norm_(register_module("second_norm", torch::nn::BatchNorm2d(out))) {
    if (in == out && stride == 1) return;
    past_->push_back(convolution(in, out, 1, stride));
    past_->push_back(torch::nn::BatchNorm2d(out));
    register_module("past", past_);
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor inner = torch::relu(first_norm_(first_(x)));
    const torch::Tensor outer = second_norm_(second_(inner));
    return torch::relu(outer + (past_->is_empty() ? x : past_->forward(x)));
  }

 private:
  torch::nn::Conv2d first_, second_;
  torch::nn::BatchNorm2d first_norm_, second_norm_;
  torch::nn::Sequential past_;
};

struct ResNetOptions {
  int64_t blocks = 3;  ///< of each of three widths
  int64_t width = 16;  ///< of the first; doubles twice
  int64_t classes = 10;
};

class ResNetImpl : public torch::nn::Module {
 public:
  ResNetImpl(const ResNetOptions& options, bool is_checkpointed) {
    stem_->push_back(convolution(3, options.width, 3, 1));
    stem_->push_back(torch::nn::BatchNorm2d(options.width));
    stem_->push_back(torch::nn::ReLU());
    register_module("stem", stem_);
    int64_t in = options.width;
    for (int64_t i = 0; i < 3; ++i)
      for (int64_t k = 0; k < options.blocks; ++k) {
        const int64_t out = options.width << i;
        blocks_->push_back(remat::Checkpointed<ResidualImpl>(in, out, i > 0 && k == 0 ? 2 : 1));
        in = out;
      }
    register_module("blocks", blocks_);
    head_ = register_module("head", torch::nn::Linear(in, options.classes));
    remat::set_checkpointing(*this, is_checkpointed);
  }

  /// (B, 3, H, W) and (B) classes -> the mean cross-entropy
  torch::Tensor loss(const torch::Tensor& pictures, const torch::Tensor& classes) {
    const torch::Tensor features = blocks_->forward(stem_->forward(pictures));
    return torch::cross_entropy_loss(head_(features.mean({2, 3})), classes);
  }

 private:
  torch::nn::Sequential stem_, blocks_;
  torch::nn::Linear head_ = nullptr;
};
TORCH_MODULE(ResNet);

}  // namespace bench
