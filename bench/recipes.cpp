// Measures regions in programs that are not a chain of blocks: recurrent nets, losses with
// gradients in them, long functions without modules, two nets that train each other, script
// modules. See METHOD.md and docs/programs.md.

#include <remat/checkpoint.h>
#include <remat/sequential.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/arguments.h"
#include "bench/measure.h"
#include "bench/rounds.h"

namespace {

using remat::checkpoint;
using torch::Tensor;
namespace nn = torch::nn;

/// One way to write a step. Backward is called on the result of `loss`.
struct Variant {
  const char* name;
  std::function<Tensor()> loss;
};

/// The first variant is plain. All others have its gradients, bit by bit, unless sums are made in
/// parts.
struct Recipe {
  const char* name;
  std::vector<Tensor> parameters;
  std::vector<Variant> variants;
  bool sums_in_parts = false;
};

// ---- a recurrent net ---------------------------------------------------------------------------

Recipe recurrent(bool smoke) {
  const int64_t length = smoke ? 32 : 256, batch = smoke ? 2 : 16, width = smoke ? 8 : 128;
  nn::LSTM lstm(nn::LSTMOptions(width, width).num_layers(2));
  const Tensor text = at::randn({length, batch, width});
  using State = std::tuple<Tensor, Tensor>;
  const State zero{at::zeros({2, batch, width}), at::zeros({2, batch, width})};
  const auto read = [lstm](const Tensor& part, const Tensor& hidden, const Tensor& cell) {
    auto [y, state] = nn::LSTM(lstm)->forward(part, State(hidden, cell));
    return std::tuple(y.square().sum(), std::get<0>(state), std::get<1>(state));
  };
  const auto whole = [=](bool region) {
    return [=] {
      const auto& [hidden, cell] = zero;
      return std::get<0>(region ? checkpoint(read, text, hidden, cell) : read(text, hidden, cell));
    };
  };
  const auto cut = [=](int64_t parts, bool region) {
    return [=] {
      auto [hidden, cell] = State(zero);
      Tensor loss = at::zeros({});
      for (const Tensor& part : text.chunk(parts)) {
        auto [sum, next_hidden, next_cell] =
            region ? checkpoint(read, part, hidden, cell) : read(part, hidden, cell);
        loss = loss + sum;
        hidden = next_hidden;
        cell = next_cell;
      }
      return loss;
    };
  };
  return {"LSTM, 256 steps",
          lstm->parameters(),
          {{"plain", whole(false)},
           {"one region", whole(true)},
           {"4 regions in time", cut(4, true)},
           {"8 regions in time", cut(8, true)},
           {"16 regions in time", cut(16, true)}},
          /*sums_in_parts=*/true};
}

// ---- a loss with gradients in it ---------------------------------------------------------------

Recipe physics(bool smoke) {
  const int64_t points = smoke ? 16 : 4096, width = smoke ? 8 : 64;
  std::vector<nn::Linear> layers{nn::Linear(2, width), nn::Linear(width, width),
                                 nn::Linear(width, width), nn::Linear(width, 1)};
  std::vector<Tensor> parameters;
  for (const nn::Linear& layer : layers)
    for (const Tensor& each : layer->parameters()) parameters.push_back(each);
  const Tensor where = at::rand({points, 2});
  const auto layer = [](const nn::Linear& linear, const Tensor& x) {
    return nn::Linear(linear)->forward(x).tanh();
  };
  const auto net = [=](const Tensor& x) {
    Tensor y = x;
    for (const nn::Linear& linear : layers) y = layer(linear, y);
    return y;
  };
  const auto net_of_regions = [=](const Tensor& x) {
    Tensor y = x;
    for (const nn::Linear& linear : layers)
      y = checkpoint([=](const Tensor& t) { return layer(linear, t); }, y);
    return y;
  };
  const auto net_in_region = [=](const Tensor& x) { return checkpoint(net, x); };
  // u_t = u_xx
  const auto residual = [](const auto& u, const Tensor& given) {
    const Tensor x = given.detach().requires_grad_();
    const auto slope_of = [](const Tensor& y, const Tensor& of) {
      return torch::autograd::grad({y.sum()}, {of}, {}, true, /*create_graph=*/true)[0];
    };
    const Tensor slope = slope_of(u(x), x);
    const Tensor curvature = slope_of(slope.select(1, 1), x).select(1, 1);
    return (slope.select(1, 0) - curvature).square().sum();
  };
  const auto parts = [=](int64_t count, bool region) {
    return [=] {
      Tensor loss = at::zeros({});
      const auto part = [=](const Tensor& x) { return residual(net, x); };
      for (const Tensor& each : where.chunk(count))
        loss = loss + (region ? checkpoint(part, each) : part(each));
      return loss;
    };
  };
  return {"equation u_t = u_xx, 4096 points",
          parameters,
          {{"plain", [=] { return residual(net, where); }},
           {"a region per layer", [=] { return residual(net_of_regions, where); }},
           {"the net in a region", [=] { return residual(net_in_region, where); }},
           {"the whole loss in a region", parts(1, true)},
           {"8 parts, plain", parts(8, false)},
           {"8 parts, each loss a region", parts(8, true)}},
          /*sums_in_parts=*/true};
}

// ---- a long function without modules -----------------------------------------------------------

/// Moves, projects and blends a cloud of Gaussians into pixels, like splatting.
Recipe splatting(bool smoke) {
  const int64_t gaussians = smoke ? 8 : 512, side = smoke ? 4 : 48;
  std::vector<Tensor> parameters{at::randn({gaussians, 3}), at::randn({gaussians, 2}) - 2,
                                 at::randn({gaussians, 3}), at::randn({gaussians})};
  for (Tensor& each : parameters) each.requires_grad_();
  const Tensor means = parameters[0], sizes = parameters[1], colours = parameters[2],
               opacities = parameters[3];
  const Tensor axis = at::linspace(-1, 1, side);
  const Tensor pixels = at::stack({axis.repeat({side}), axis.repeat_interleave(side)}, 1);
  const Tensor truth = at::rand({side * side, 3});
  // The locals of one long function are arguments here.
  const auto project = [](const Tensor& means, const Tensor& sizes) {
    const Tensor depth = means.select(1, 2).sigmoid() + 1;
    return std::tuple(means.narrow(1, 0, 2) / depth.unsqueeze(1), sizes.exp() / depth.unsqueeze(1));
  };
  const auto blend = [](const Tensor& pixels, const Tensor& centres, const Tensor& extents,
                        const Tensor& colours, const Tensor& opacities) {
    const Tensor away = (pixels.unsqueeze(1) - centres.unsqueeze(0)) / extents.unsqueeze(0);
    const Tensor alpha = opacities.sigmoid() * (-away.square().sum(2) / 2).exp() * 0.9;
    const Tensor left = (1 - alpha).cumprod(1) / (1 - alpha);
    return (alpha * left).mm(colours.sigmoid());
  };
  const auto draw = [=](bool region, int64_t tiles) {
    return [=] {
      const auto [centres, extents] = project(means, sizes);
      std::vector<Tensor> drawn;
      for (const Tensor& tile : pixels.chunk(tiles))
        drawn.push_back(region ? checkpoint(blend, tile, centres, extents, colours, opacities)
                               : blend(tile, centres, extents, colours, opacities));
      return at::mse_loss(at::cat(drawn), truth);
    };
  };
  return {"512 Gaussians on 48 x 48 pixels",
          parameters,
          {{"plain", draw(false, 1)},
           {"blending is a region", draw(true, 1)},
           {"9 tiles, plain", draw(false, 9)},
           {"9 tiles, each a region", draw(true, 9)}},
          /*sums_in_parts=*/true};
}

// ---- two nets that train each other ------------------------------------------------------------

/// A step has three backward calls; the loss of the last one is returned.
Recipe adversarial(bool smoke) {
  const int64_t batch = smoke ? 2 : 16, width = smoke ? 4 : 32;
  const auto wider = [](int64_t in, int64_t out, int64_t stride) {
    return nn::ConvTranspose2d(
        nn::ConvTranspose2dOptions(in, out, 4).stride(stride).padding(stride - 1).bias(false));
  };
  const auto narrower = [](int64_t in, int64_t out, int64_t stride) {
    return nn::Conv2d(nn::Conv2dOptions(in, out, 4).stride(stride).padding(stride - 1).bias(false));
  };
  const auto relu = [] { return nn::ReLU(nn::ReLUOptions(true)); };
  const auto leaky = [] {
    return nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2).inplace(true));
  };
  const nn::Sequential maker(wider(16, 4 * width, 1), nn::BatchNorm2d(4 * width), relu(),
                             wider(4 * width, 2 * width, 2), nn::BatchNorm2d(2 * width), relu(),
                             wider(2 * width, width, 2), nn::BatchNorm2d(width), relu(),
                             wider(width, 3, 2), nn::Tanh());
  const nn::Sequential judge(narrower(3, width, 2), leaky(), narrower(width, 2 * width, 2),
                             nn::BatchNorm2d(2 * width), leaky(), narrower(2 * width, 4 * width, 2),
                             nn::BatchNorm2d(4 * width), leaky(), narrower(4 * width, 1, 1),
                             nn::Flatten());
  const Tensor real = at::randn({batch, 3, 32, 32}), noise = at::randn({batch, 16, 1, 1});
  const auto step = [=](int64_t of_maker, int64_t of_judge) {
    const auto run = [](nn::Sequential net, int64_t segments, const Tensor& x) {
      return segments == 0 ? net->forward(x)
                           : remat::checkpoint_sequential(
                                 net, segments, x,
                                 {.split = remat::Split::Balanced, .checkpoint_last = true});
    };
    const auto judged = [=](const Tensor& x, double truth) {
      const Tensor y = run(judge, of_judge, x);
      return at::binary_cross_entropy_with_logits(y, at::full_like(y, truth));
    };
    return [=] {
      const Tensor made = run(maker, of_maker, noise);
      judged(real, 1).backward();
      judged(made.detach(), 0).backward();
      return judged(made, 1);
    };
  };
  std::vector<Tensor> parameters = maker->parameters();
  for (const Tensor& each : judge->parameters()) parameters.push_back(each);
  return {"GAN of two convolutional nets",
          parameters,
          {{"plain", step(0, 0)},
           {"the discriminator in 3 regions", step(0, 3)},
           {"both in 3 regions", step(3, 3)}}};
}

// ---- a model that is a script ------------------------------------------------------------------

Recipe scripted(bool smoke) {
  const int64_t batch = smoke ? 4 : 512, width = smoke ? 8 : 128;
  const auto parameter = [](at::IntArrayRef sizes, double scale) {
    return at::randn(sizes).mul_(scale).requires_grad_();
  };
  std::vector<torch::jit::Module> blocks;
  std::vector<Tensor> parameters;
  for (int i = 0; i < 8; ++i) {
    torch::jit::Module& block = blocks.emplace_back("block");
    block.register_parameter("wide", parameter({width, 4 * width}, 0.1), false);
    block.register_parameter("narrow", parameter({4 * width, width}, 0.05), false);
    block.register_parameter("scale", at::ones({width}).requires_grad_(), false);
    block.define(R"(
def forward(self, x):
  h = torch.matmul(torch.layer_norm(x, [x.size(1)], self.scale), self.wide)
  return x + torch.matmul(torch.sigmoid(1.702 * h) * h, self.narrow)
)");
    for (const Tensor& each : block.parameters()) parameters.push_back(each);
  }
  const Tensor given = at::randn({batch, width});
  const auto each_by = [=](auto run) {
    return [=] {
      Tensor x = given;
      for (const torch::jit::Module& block : blocks) x = run(block, x);
      return x.square().mean();
    };
  };
  const auto plain = [](torch::jit::Module block, const Tensor& x) {
    return block.forward({x}).toTensor();
  };
  const auto region = [](const torch::jit::Module& block, const Tensor& x) {
    return checkpoint(block, x).toTensor();
  };
  const auto inside = [plain](const torch::jit::Module& block, const Tensor& x) {
    return checkpoint([=](const Tensor& in) { return plain(block, in); }, x);
  };
  for (int i = 0; i < 3; ++i) each_by(plain)().backward();  // executors settle
  return {"script module of 8 blocks",
          parameters,
          {{"plain", each_by(plain)},
           {"each block a region", each_by(region)},
           {"each called in a region's lambda", each_by(inside)}}};
}

std::vector<Tensor> gradients(const Recipe& recipe, const Variant& variant) {
  for (const Tensor& each : recipe.parameters) each.mutable_grad() = Tensor();
  variant.loss().backward();
  std::vector<Tensor> all;
  for (const Tensor& each : recipe.parameters) all.push_back(each.grad().clone());
  return all;
}

void require_right(const Recipe& recipe, const Variant& variant, const std::vector<Tensor>& plain) {
  const std::vector<Tensor> found = gradients(recipe, variant);
  if (!recipe.sums_in_parts) return bench::require_plain(found, plain, variant.name);
  for (std::size_t i = 0; i < plain.size(); ++i)
    if (!at::allclose(found[i], plain[i], 1e-3, 1e-4 * plain[i].abs().max().item<double>()))
      throw std::runtime_error(std::string("WRONG: ") + recipe.name + ", " + variant.name);
}

int run(int argc, char** argv) {
  std::string threads = "1";
  const bench::Arguments arguments = bench::parse(argc, argv, {{"--threads N", &threads}});
  at::set_num_threads(std::stoi(threads));
  at::manual_seed(1);
  const remat::MemoryMeter first;  // before the tensors that it counts
  for (const auto make : {recurrent, physics, splatting, adversarial, scripted}) {
    const Recipe recipe = make(arguments.smoke);
    const std::vector<Tensor> plain = gradients(recipe, recipe.variants[0]);
    std::vector<bench::StepBytes> bytes;
    std::vector<bench::Cell> cells;
    for (const Variant& variant : recipe.variants) {
      require_right(recipe, variant, plain);
      bytes.push_back(bench::bytes_of(variant.loss));
      cells.emplace_back([&variant] { variant.loss().backward(); });
    }
    if (arguments.smoke) continue;
    bench::measure(cells, arguments);
    const bench::Statistics step = cells[0].result();
    std::fprintf(stderr, "%-32s %13s %9s %10s %9s\n", recipe.name, "peak bytes", "of plain",
                 "min [ms]", "of plain");
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const bench::Statistics result = cells[i].result();
      const auto peak = static_cast<long long>(bytes[i].peak);
      bench::print_json("recipes",
                        bench::text("\"recipe\": \"%s\", \"variant\": \"%s\"", recipe.name,
                                    recipe.variants[i].name),
                        arguments, result, bench::text("\"peak_bytes\": %lld", peak));
      std::fprintf(stderr, "  %-30s %13lld %9.3f %10.2f %9.3f\n", recipe.variants[i].name, peak,
                   static_cast<double>(bytes[i].peak) / static_cast<double>(bytes[0].peak),
                   result.min_ns / 1e6, result.min_ns / step.min_ns);
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::main_of(run, argc, argv); }
