// Trains a U-Net to remove noise from a photograph, with none, some and all of its parts as
// regions.
//
// `use_checkpoint` has three settings, as levels of `remat::set_checkpoint_level`: 0 for none; 1
// for each block of two convolutions; 2 also for each level of the net, which contains the levels
// below, so that regions nest. Each trains from the same seed on the same crops and noise. The
// losses must be equal bit by bit in every step, and the weights and running statistics in the end.
// The program prints a table of peak bytes and time, and writes a picture: noisy, denoised,
// original.
//
// Exit status: 0, or 1 if a training on the CPU differs from the plain one (kernels of accelerators
// may add in another order each time), or 2 if it was called wrongly.

#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "command_line.h"
#include "remat/remat.h"
#include "target.h"
#include "unet/image.h"
#include "unet/model.h"

#ifndef REMAT_EXAMPLE_PHOTO
#define REMAT_EXAMPLE_PHOTO "examples/data/portrait.ppm"
#endif

namespace {

constexpr const char* kUsage =
    "usage: unet [--norm instance|batch] [--steps N] [--small] [--photo FILE] [--out DIR]\n"
    "            [--device NAME] [--dtype NAME]\n"
    "  --norm KIND   the normalisation in each block (default: batch)\n"
    "  --steps N     training steps of each setting (default: 120)\n"
    "  --small       a tiny net and few steps: a few seconds, to see that everything works\n"
    "  --photo FILE  a binary PPM file (default: " REMAT_EXAMPLE_PHOTO
    ")\n"
    "  --out DIR     where to write unet.ppm (default: " REMAT_EXAMPLE_OUT ")\n" REMAT_TARGET_USAGE;

struct Options {
  unet::Norm norm = unet::Norm::Batch;
  std::vector<int64_t> channels{3, 16, 32, 64};
  int64_t steps = 120, batch_size = 4, crop = 64;
  std::string photo = REMAT_EXAMPLE_PHOTO, out = REMAT_EXAMPLE_OUT;
  Target target;
};

Options parse(int argc, char** argv) {
  Options options;
  parse_options(argc, argv, [&](const std::string& name, const auto& value) {
    if (name == "--norm") {
      const std::string norm = value();
      if (norm != "instance" && norm != "batch")
        throw UsageError("--norm is 'instance' or 'batch', got '" + norm + "'");
      options.norm = norm == "batch" ? unet::Norm::Batch : unet::Norm::Instance;
    } else if (name == "--steps") {
      options.steps = parse_number<int64_t>(name, value(), 1, 1'000'000);
    } else if (name == "--small") {
      options.channels = {3, 4, 8, 8};
      options.steps = 10;
      options.batch_size = 2;
      options.crop = 32;
    } else if (name == "--photo") {
      options.photo = value();
    } else if (name == "--out") {
      options.out = value();
    } else {
      return options.target.take(name, value);
    }
    return true;
  });
  return options;
}

constexpr double kNoise = 0.15;

struct Training {
  unet::UNet net = nullptr;
  std::vector<double> losses{};
  int64_t peak_bytes = 0;
  double seconds = 0;
};

// Trains once. Returns losses, final state and costs; all but the costs are the same for every
// level, if regions change nothing.
Training train(const Options& options, const torch::Tensor& photo, int64_t level) {
  torch::manual_seed(7);
  Training done{.net = unet::UNet(options.channels, options.norm)};
  done.net->to(options.target.device);
  remat::set_checkpoint_level(*done.net, level);
  torch::optim::Adam optimizer(done.net->parameters(), torch::optim::AdamOptions(2e-3));
  for (torch::Tensor& parameter : done.net->parameters())
    parameter.mutable_grad() = torch::zeros_like(parameter);
  remat::MemoryMeter meter(options.target.device);
  for (int64_t step = 0; step < options.steps; ++step) {
    std::vector<torch::Tensor> crops;
    for (int64_t i = 0; i < options.batch_size; ++i) {
      const auto corner = [&](int64_t size) {
        return torch::randint(size - options.crop + 1, {}, torch::kLong).item<int64_t>();
      };
      const int64_t top = corner(photo.size(1)), left = corner(photo.size(2));
      crops.push_back(photo.slice(1, top, top + options.crop).slice(2, left, left + options.crop));
    }
    const torch::Tensor clean = torch::stack(crops);
    const torch::Tensor noise = torch::randn_like(clean) * kNoise;
    optimizer.zero_grad(/*set_to_none=*/false);
    const int64_t before = meter.live_bytes();
    meter.reset_peak();
    const auto begin = std::chrono::steady_clock::now();
    const torch::Tensor loss = [&] {
      const Autocast autocast(options.target);
      return torch::mse_loss(done.net(clean + noise), noise);
    }();
    loss.backward();
    options.target.wait();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    done.seconds += took.count() / static_cast<double>(options.steps);
    done.peak_bytes = std::max(done.peak_bytes, meter.peak_bytes() - before);
    optimizer.step();
    done.losses.push_back(loss.item<double>());
  }
  return done;
}

bool is_equal(const Training& a, const Training& b) {
  if (a.losses != b.losses) return false;
  const auto same = [](const std::vector<torch::Tensor>& x, const std::vector<torch::Tensor>& y) {
    for (size_t i = 0; i < x.size(); ++i)
      if (!torch::equal(x[i], y[i])) return false;
    return x.size() == y.size();
  };
  return same(a.net->parameters(), b.net->parameters()) && same(a.net->buffers(), b.net->buffers());
}

double error_of(const torch::Tensor& image, const torch::Tensor& truth) {
  return std::sqrt(torch::mse_loss(image, truth).item<double>());
}

int run(const Options& options) {
  const torch::Tensor photo = unet::read_ppm(options.photo).to(options.target.device);
  if (photo.size(1) < options.crop || photo.size(2) < options.crop)
    throw std::runtime_error("the photograph is smaller than a crop of " +
                             std::to_string(options.crop) + " pixels");
  std::filesystem::create_directories(options.out);
  if (!options.target.device.is_cpu()) std::printf("On %s.\n\n", options.target.name().c_str());
  const char* names[] = {"nothing", "blocks", "blocks and levels"};
  std::vector<Training> trainings;
  std::printf("%-20s %12s %8s %8s %10s  %s\n", "checkpointed", "peak bytes", "of plain", "time",
              "last loss", "against plain");
  bool all_equal = true;
  for (int64_t level = 0; level < 3; ++level) {
    trainings.push_back(train(options, photo, level));
    const Training& plain = trainings.front();
    const Training& now = trainings.back();
    const bool equal = is_equal(now, plain);
    all_equal = all_equal && equal;
    std::printf("%-20s %12lld %7.1f%% %7.2fx %10.6f  %s\n", names[level],
                static_cast<long long>(now.peak_bytes),
                100.0 * static_cast<double>(now.peak_bytes) / static_cast<double>(plain.peak_bytes),
                now.seconds / plain.seconds, now.losses.back(), equal ? "equal" : "DIFFERENT");
  }

  const torch::NoGradGuard no_grad;
  unet::UNet& net = trainings.back().net;
  net->eval();
  torch::manual_seed(11);
  const torch::Tensor noise = torch::randn_like(photo) * kNoise;
  const torch::Tensor noisy = photo + noise;
  const torch::Tensor denoised = noisy - net(noisy.unsqueeze(0)).squeeze(0);
  const std::string picture = (std::filesystem::path(options.out) / "unet.ppm").string();
  unet::write_ppm(picture, {noisy.cpu(), denoised.cpu(), photo.cpu()});
  std::printf("\nroot mean square error of the photograph: %.3f noisy, %.3f denoised\n",
              error_of(noisy, photo), error_of(denoised, photo));
  std::printf("%s: noisy, denoised, original\n", picture.c_str());
  std::printf("losses, weights and running statistics of all three: %s\n",
              all_equal ? "equal, bit by bit" : "DIFFERENT");
  return all_equal || !options.target.is_reproducible() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  return run_example("unet", kUsage, argc, argv, [&] { return run(parse(argc, argv)); });
}
