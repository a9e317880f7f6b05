#pragma once
// The nets of the benchmark of budgets, in the sizes of the prototype that chose the values to
// drop: a transformer with written-out attention, a residual net with batch norms, a U-Net.

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "remat/plan.h"

namespace bench {

namespace nn = torch::nn;
using torch::Tensor;

struct NetSize {
  int64_t blocks, width, batch, side;  ///< `side`: of a picture, or the length of a text
};

/// One operator, as in Python. `torch::nn::Linear` takes two for (B, T, width).
inline Tensor linear(const Tensor& x, const nn::Linear& layer) {
  return torch::linear(x, layer->weight, layer->bias);
}

/// A pre-norm block whose attention saves its probabilities. (B, T, width) -> (B, T, width)
class WrittenOutBlockImpl : public nn::Module {
 public:
  explicit WrittenOutBlockImpl(int64_t width)
      : norm1_(register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({width})))),
        norm2_(register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({width})))),
        qkv_(register_module("qkv", nn::Linear(width, 3 * width))),
        out_(register_module("out", nn::Linear(width, width))),
        up_(register_module("up", nn::Linear(width, 4 * width))),
        down_(register_module("down", nn::Linear(4 * width, width))) {}

  Tensor forward(Tensor x) {
    constexpr int64_t heads = 4;
    constexpr double dropout = 0.1;
    const int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto parts = linear(norm1_(x), qkv_)
                           .view({batch, length, 3, heads, width / heads})
                           .permute({2, 0, 3, 1, 4})
                           .unbind(0);
    Tensor scores =
        parts[0].matmul(parts[1].transpose(-2, -1)) / std::sqrt(static_cast<double>(width / heads));
    scores = scores.masked_fill(torch::ones({length, length}, torch::kBool).triu(1),
                                -std::numeric_limits<float>::infinity());
    const Tensor shares = torch::dropout(scores.softmax(-1), dropout, true);
    const Tensor mixed = shares.matmul(parts[2]).transpose(1, 2).reshape({batch, length, width});
    x = x + torch::dropout(linear(mixed, out_), dropout, true);
    return x + torch::dropout(linear(torch::gelu(linear(norm2_(x), up_)), down_), dropout, true);
  }

 private:
  nn::LayerNorm norm1_, norm2_;
  nn::Linear qkv_, out_, up_, down_;
};
TORCH_MODULE(WrittenOutBlock);

class WrittenOutTransformerImpl : public nn::Module {
 public:
  WrittenOutTransformerImpl(const NetSize& size, const Tensor& ids)
      : ids_(ids.narrow(1, 0, size.side)),
        targets_(ids.narrow(1, 1, size.side).flatten()),
        token_(register_module("token", nn::Embedding(64, size.width))),
        position_(register_module("position", nn::Embedding(size.side, size.width))),
        norm_(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({size.width})))),
        head_(register_module("head", nn::Linear(size.width, 64))) {
    for (int64_t i = 0; i < size.blocks; ++i)
      blocks_.push_back(register_module("block" + std::to_string(i), WrittenOutBlock(size.width)));
  }

  Tensor loss() {
    Tensor x = embedded(ids_);
    for (WrittenOutBlock& each : blocks_) x = each(x);
    return loss_of(x);
  }

  std::vector<remat::Stage> stages() {
    std::vector<remat::Stage> all;
    all.emplace_back([this](const Tensor& ids) { return embedded(ids); });
    for (const WrittenOutBlock& each : blocks_)
      all.emplace_back(
          [block = WrittenOutBlock(each)](const Tensor& x) mutable { return block(x); });
    all.emplace_back([this](const Tensor& x) { return loss_of(x); });
    return all;
  }
  const Tensor& ids() const { return ids_; }

 private:
  Tensor embedded(const Tensor& ids) { return token_(ids) + position_(torch::arange(ids.size(1))); }
  Tensor loss_of(const Tensor& x) {
    return torch::cross_entropy_loss(linear(norm_(x), head_).flatten(0, 1), targets_);
  }

  const Tensor ids_, targets_;
  nn::Embedding token_, position_;
  std::vector<WrittenOutBlock> blocks_;
  nn::LayerNorm norm_;
  nn::Linear head_;
};
TORCH_MODULE(WrittenOutTransformer);

/// Residual blocks of one width.
class ResidualNetImpl : public nn::Module {
 public:
  ResidualNetImpl(const NetSize& size, const Tensor& pictures, const Tensor& classes)
      : pictures_(pictures),
        classes_(classes),
        stem_(register_module("stem", conv(3, size.width, true))),
        head_(register_module("head", nn::Linear(size.width, 10))) {
    for (int64_t i = 0; i < size.blocks; ++i) {
      const std::string name = std::to_string(i);
      blocks_.push_back({register_module("a" + name, conv(size.width, size.width, false)),
                         register_module("b" + name, conv(size.width, size.width, false)),
                         register_module("m" + name, nn::BatchNorm2d(size.width)),
                         register_module("n" + name, nn::BatchNorm2d(size.width))});
    }
  }

  Tensor loss() {
    Tensor x = stem_(pictures_);
    for (Layers& each : blocks_)
      x = torch::relu(x + each.n(each.b(torch::relu(each.m(each.a(x))))));
    x = torch::adaptive_avg_pool2d(x, {1, 1}).flatten(1);
    return torch::cross_entropy_loss(head_(x), classes_);
  }

 private:
  struct Layers {
    nn::Conv2d a, b;
    nn::BatchNorm2d m, n;
  };
  static nn::Conv2d conv(int64_t in, int64_t out, bool has_bias) {
    return nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1).bias(has_bias));
  }
  const Tensor pictures_, classes_;
  nn::Conv2d stem_;
  nn::Linear head_;
  std::vector<Layers> blocks_;
};
TORCH_MODULE(ResidualNet);

/// Four levels of two convolutions with group norms.
class UNetImpl : public nn::Module {
 public:
  UNetImpl(const NetSize& size, const Tensor& pictures) : pictures_(pictures) {
    std::vector<int64_t> widths;
    for (int64_t i = 0; i <= size.blocks; ++i) widths.push_back(size.width << i);
    for (std::size_t i = 0; i < widths.size(); ++i)
      down_.push_back(two(i == 0 ? 4 : widths[i - 1], widths[i]));
    for (std::size_t i = widths.size() - 1; i > 0; --i) {
      up_.push_back(
          nn::ConvTranspose2d(nn::ConvTranspose2dOptions(widths[i], widths[i - 1], 2).stride(2)));
      register_module("up" + std::to_string(i), up_.back());
      mix_.push_back(two(2 * widths[i - 1], widths[i - 1]));
    }
    head_ = register_module("head", nn::Conv2d(nn::Conv2dOptions(size.width, 1, 1)));
  }

  Tensor loss() {
    std::vector<Tensor> beside;
    Tensor x = pictures_;
    for (std::size_t i = 0; i < down_.size(); ++i) {
      x = down_[i]->forward(i > 0 ? torch::max_pool2d(x, 2) : x);
      beside.push_back(x);
    }
    beside.pop_back();
    for (std::size_t i = 0; i < up_.size(); ++i) {
      x = mix_[i]->forward(torch::cat({up_[i](x), beside.back()}, 1));
      beside.pop_back();
    }
    return head_(x).square().mean();
  }

 private:
  nn::Sequential two(int64_t in, int64_t out) {
    const auto conv = [](int64_t from, int64_t to) {
      return nn::Conv2d(nn::Conv2dOptions(from, to, 3).padding(1));
    };
    nn::Sequential layers(conv(in, out), nn::GroupNorm(4, out), nn::GELU(), conv(out, out),
                          nn::GroupNorm(4, out), nn::GELU());
    return register_module("two" + std::to_string(num_++), layers);
  }
  const Tensor pictures_;
  int64_t num_ = 0;
  std::vector<nn::Sequential> down_, mix_;
  std::vector<nn::ConvTranspose2d> up_;
  nn::Conv2d head_ = nullptr;
};
TORCH_MODULE(UNet);

}  // namespace bench
