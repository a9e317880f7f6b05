#pragma once
// A U-Net of checkpointed parts: blocks of two convolutions, in levels that contain each other.

#include <torch/torch.h>

#include <utility>
#include <vector>

#include "remat/module.h"

namespace unet {

enum class Norm { Instance, Batch };

struct BlockImpl : torch::nn::Cloneable<BlockImpl> {
  BlockImpl(int64_t from, int64_t to, Norm norm) : from(from), to(to), norm(norm) { reset(); }
  void reset() override {
    layers = register_module("layers", torch::nn::Sequential());
    for (int64_t in : {from, to}) {
      layers->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(in, to, 3).padding(1)));
      if (norm == Norm::Batch)
        layers->push_back(torch::nn::BatchNorm2d(to));
      else
        layers->push_back(
            torch::nn::InstanceNorm2d(torch::nn::InstanceNorm2dOptions(to).affine(true)));
      layers->push_back(torch::nn::SiLU());
    }
  }
  // (B, from, H, W) -> (B, to, H, W)
  torch::Tensor forward(const torch::Tensor& x) { return layers->forward(x); }

  int64_t from, to;
  Norm norm;
  torch::nn::Sequential layers = nullptr;
};

// One level: a block on the way down, the levels below at half the size, and a block on the way up.
struct LevelImpl : torch::nn::Cloneable<LevelImpl> {
  // `channels`: of the input, of this level, and of those below.
  LevelImpl(std::vector<int64_t> channels, Norm norm) : channels(std::move(channels)), norm(norm) {
    reset();
  }
  void reset() override;
  // (B, channels[0], H, W) -> (B, channels[1], H, W)
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor here = down(x);
    if (!below) return here;
    const torch::Tensor from_below = torch::upsample_nearest2d(
        below->forward(torch::max_pool2d(here, 2)), {here.size(2), here.size(3)});
    return up(torch::cat({here, from_below}, 1));
  }

  std::vector<int64_t> channels;
  Norm norm;
  remat::Checkpointed<BlockImpl> down = nullptr, up = nullptr;
  // Not a holder, since LibTorch's holders need a complete type.
  std::shared_ptr<remat::CheckpointedImpl<LevelImpl>> below;
};

// Blocks are regions from level 1 on; from level 2 on, each level of the net is a region around
// them.
inline void LevelImpl::reset() {
  const remat::ModuleOptions block{.level = 1}, level{.level = 2};
  down = register_module("down",
                         remat::Checkpointed<BlockImpl>(block, channels[0], channels[1], norm));
  if (channels.size() == 2) return;
  below = register_module(
      "below", std::make_shared<remat::CheckpointedImpl<LevelImpl>>(
                   level, std::vector<int64_t>(channels.begin() + 1, channels.end()), norm));
  up = register_module(
      "up", remat::Checkpointed<BlockImpl>(block, channels[1] + channels[2], channels[1], norm));
}

// Estimates the noise in a noisy picture.
struct UNetImpl : torch::nn::Cloneable<UNetImpl> {
  UNetImpl(std::vector<int64_t> channels, Norm norm) : channels(std::move(channels)), norm(norm) {
    reset();
  }
  void reset() override {
    net = register_module(
        "net", remat::Checkpointed<LevelImpl>(remat::ModuleOptions{.level = 2}, channels, norm));
    last = register_module(
        "last", torch::nn::Conv2d(torch::nn::Conv2dOptions(channels[1], channels[0], 1)));
  }
  // (B, 3, H, W) -> (B, 3, H, W)
  torch::Tensor forward(const torch::Tensor& x) { return last(net(x)); }

  std::vector<int64_t> channels;
  Norm norm;
  remat::Checkpointed<LevelImpl> net = nullptr;
  torch::nn::Conv2d last = nullptr;
};
TORCH_MODULE(UNet);

}  // namespace unet
