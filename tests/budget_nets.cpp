// Whole nets under a byte budget: the gradients, buffers and generator of the plain net, bit by
// bit.

#include <ATen/CPUGeneratorImpl.h>
#include <remat/budget.h>

#include <limits>
#include <string>

#include "tests/support/nn.h"

namespace nn = torch::nn;

namespace {

struct Net {
  Tensors parameters, buffers;
  std::function<void()> step;

  void add(const nn::Module& module) {
    for (const Tensor& each : module.parameters()) parameters.push_back(each);
    for (const Tensor& each : module.buffers()) buffers.push_back(each);
  }
};

struct BlockImpl : nn::Module {
  explicit BlockImpl(int64_t width) : heads(2) {
    norm1 = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({width})));
    norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({width})));
    qkv = register_module("qkv", nn::Linear(width, 3 * width));
    out = register_module("out", nn::Linear(width, width));
    up = register_module("up", nn::Linear(width, 4 * width));
    down = register_module("down", nn::Linear(4 * width, width));
  }
  Tensor forward(Tensor x) {
    const int64_t b = x.size(0), t = x.size(1), w = x.size(2);
    const auto parts =
        qkv(norm1(x)).view({b, t, 3, heads, w / heads}).permute({2, 0, 3, 1, 4}).unbind(0);
    Tensor a = parts[0].matmul(parts[1].transpose(-2, -1)) / 4.0;
    a = a.masked_fill(at::ones({t, t}, at::kBool).triu(1), -std::numeric_limits<float>::infinity());
    a = at::dropout(a.softmax(-1), 0.1, true);
    x = x + at::dropout(out(a.matmul(parts[2]).transpose(1, 2).reshape({b, t, w})), 0.1, true);
    return x + at::dropout(down(at::gelu(up(norm2(x)))), 0.1, true);
  }
  const int64_t heads;
  nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

Net gpt() {
  constexpr int64_t width = 32, length = 16;
  Net net;
  nn::Embedding token(64, width), position(length, width);
  std::vector<Block> blocks;
  nn::Linear head(width, 64);
  net.add(*token);
  net.add(*position);
  for (int i = 0; i < 6; ++i) net.add(*blocks.emplace_back(width));
  net.add(*head);
  const Tensor ids = at::randint(64, {4, length + 1}, at::kLong);
  net.step = [=]() mutable {
    Tensor x = token(ids.slice(1, 0, length)) + position(at::arange(length));
    for (Block& block : blocks) x = block(x);
    at::cross_entropy_loss(head(x).flatten(0, 1), ids.slice(1, 1).flatten()).backward();
  };
  return net;
}

Net resnet(bool is_inplace) {
  constexpr int64_t channels = 8;
  struct Layer {
    nn::Conv2d a, b;
    nn::BatchNorm2d m, n;
  };
  const auto conv = [](int64_t in) {
    return nn::Conv2d(nn::Conv2dOptions(in, channels, 3).padding(1).bias(false));
  };
  Net net;
  nn::Conv2d stem = conv(3);
  std::vector<Layer> layers;
  net.add(*stem);
  for (int i = 0; i < 5; ++i) {
    layers.push_back(
        {conv(channels), conv(channels), nn::BatchNorm2d(channels), nn::BatchNorm2d(channels)});
    net.add(*layers.back().a);
    net.add(*layers.back().b);
    net.add(*layers.back().m);
    net.add(*layers.back().n);
  }
  const Tensor x = at::randn({4, 3, 12, 12});
  net.step = [=]() mutable {
    const auto act = [&](Tensor t) { return is_inplace ? t.relu_() : t.relu(); };
    Tensor h = stem(x);
    for (Layer& each : layers) h = act(h + each.n(each.b(act(each.m(each.a(h))))));
    h.square().mean().backward();
  };
  return net;
}

Net unet() {
  Net net;
  const auto conv = [&](int64_t in, int64_t out) {
    nn::Sequential both(nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1)), nn::GroupNorm(2, out),
                        nn::GELU());
    net.add(*both);
    return both;
  };
  nn::Sequential a = conv(3, 8), b = conv(8, 16), c = conv(16, 16), d = conv(32, 8),
                 e = conv(16, 8);
  nn::ConvTranspose2d up1(nn::ConvTranspose2dOptions(16, 16, 2).stride(2)),
      up2(nn::ConvTranspose2dOptions(8, 8, 2).stride(2));
  net.add(*up1);
  net.add(*up2);
  const Tensor x = at::randn({2, 3, 16, 16});
  net.step = [=]() mutable {
    const Tensor one = a->forward(x), two = b->forward(at::max_pool2d(one, 2));
    const Tensor three = c->forward(at::max_pool2d(two, 2));
    const Tensor four = d->forward(at::cat({up1(three), two}, 1));
    e->forward(at::cat({up2(four), one}, 1)).square().mean().backward();
  };
  return net;
}

Net recurrent() {
  constexpr int64_t width = 32, length = 16;
  Net net;
  nn::Linear from_x(width, 4 * width), from_h(width, 4 * width), out(width, 1);
  for (const nn::Linear& each : {from_x, from_h, out}) net.add(*each);
  const Tensor x = at::randn({length, 16, width});
  net.step = [=]() mutable {
    Tensor h = at::zeros({16, width}), c = h, loss = at::zeros({});
    for (int64_t t = 0; t < length; ++t) {
      const auto gates = (from_x(x[t]) + from_h(h)).chunk(4, -1);
      c = gates[1].sigmoid() * c + gates[0].sigmoid() * gates[2].tanh();
      h = gates[3].sigmoid() * c.tanh();
      loss = loss + out(h).square().mean();
    }
    loss.backward();
  };
  return net;
}

/// A recursion whose ways depend on values.
Net tree() {
  constexpr int64_t width = 32;
  Net net;
  nn::Linear cell(2 * width, width), leaf(width, width);
  net.add(*cell);
  net.add(*leaf);
  const Tensor x = at::randn({24, 8, width});
  net.step = [=]() mutable {
    const std::function<Tensor(int64_t, int64_t)> node = [&](int64_t from, int64_t to) {
      if (to - from == 1) return leaf(x[from]).tanh();
      const int64_t middle = from + 1 +
                             static_cast<int64_t>(std::abs(x[from][0][0].item<float>()) * 1000) %
                                 (to - from - 1 > 0 ? to - from - 1 : 1);
      Tensor y = cell(at::cat({node(from, middle), node(middle, to)}, -1)).tanh();
      if (y.mean().item<float>() > 0) y = y * 0.9;
      return y;
    };
    node(0, 24).mean().backward();
  };
  return net;
}

Net perceptron() {
  Net net;
  nn::Sequential layers;
  for (int i = 0; i < 6; ++i) {
    layers->push_back(nn::Linear(48, 48));
    layers->push_back(nn::ReLU());
    layers->push_back(nn::Dropout(0.3));
  }
  net.add(*layers);
  const Tensor x = at::randn({64, 48});
  net.step = [=]() mutable { layers->forward(x).square().mean().backward(); };
  return net;
}

Tensors run(const std::function<Net()>& make, int64_t bytes, int64_t& peak, int64_t& floor) {
  at::manual_seed(0);
  Net net = make();
  for (Tensor& each : net.parameters) each.mutable_grad() = at::zeros_like(each);
  remat::MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  meter.reset_peak();
  {
    std::unique_ptr<remat::BudgetGuard> guard;
    if (bytes > 0)
      guard = std::make_unique<remat::BudgetGuard>(remat::BudgetOptions{.bytes = bytes});
    for (int i = 0; i < 2; ++i) net.step();
    floor = guard == nullptr ? 0 : guard->report().floor_bytes;
  }
  peak = meter.peak_bytes() - before;
  CHECK(meter.live_bytes() == before);
  Tensors all;
  for (const Tensor& each : net.parameters) all.push_back(each.grad().clone());
  for (const Tensor& each : net.buffers) all.push_back(each.clone());
  all.push_back(at::detail::getDefaultCPUGenerator().get_state());
  return all;
}

}  // namespace

TEST_CASE("whole nets are the same within any budget", "[budget]") {
  const Seed seed(1);
  const std::vector<std::pair<std::string, std::function<Net()>>> nets{
      {"perceptron", perceptron},
      {"gpt", gpt},
      {"resnet", [] { return resnet(false); }},
      {"resnet with activations in place", [] { return resnet(true); }},
      {"u-net", unet},
      {"recurrent", recurrent},
      {"tree", tree}};
  for (const auto& [name, make] : nets) {
    int64_t span = 0, peak = 0, floor = 0;
    const Tensors plain = run(make, 0, span, floor);
    for (const double share : {4.0, 0.8, 0.5, 0.3, 0.15}) {
      const auto bytes = static_cast<int64_t>(share * static_cast<double>(span));
      const Tensors budgeted = run(make, bytes, peak, floor);
      INFO(name << " at " << share << " of " << span << " bytes: " << peak << ", floor " << floor);
      REQUIRE(plain.size() == budgeted.size());
      for (std::size_t i = 0; i < plain.size(); ++i) REQUIRE(plain[i].equal(budgeted[i]));
      CHECK(peak <= std::max(bytes, floor * 11 / 10));
    }
  }
}
