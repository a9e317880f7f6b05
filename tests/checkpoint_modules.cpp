// checkpoint() of torch::nn modules, by call: nets, many small calls, normalisation, training.

#include <torch/optim/adam.h>

#include "tests/support/nn.h"

using remat::checkpoint;
namespace nn = torch::nn;

namespace {

// A deep copy of a module, with the same parameters in new tensors.
template <class Holder>
Holder copy_of_module(const Holder& module) {
  return Holder(std::dynamic_pointer_cast<typename Holder::ContainedType>(module->clone()));
}

Tensors grads_of(const nn::Module& module) {
  Tensors grads;
  for (const Tensor& parameter : module.parameters()) grads.push_back(parameter.grad());
  return grads;
}

struct TwoOutputsImpl : nn::Module {
  nn::Linear linear = register_module("linear", nn::Linear(20, 20));
  std::tuple<Tensor, Tensor, std::optional<Tensor>, Tensor> forward(
      const Tensor& x, const Tensor& y, std::optional<Tensor> scale = std::nullopt,
      std::optional<Tensor> mask = std::nullopt) {
    Tensor out = linear(x) + y;
    if (scale) out = out * *scale;
    Tensor masked = mask ? out.masked_fill(*mask, 0.0) : out;
    return {out.sin(), masked.detach() * 2, mask, masked.cos()};
  }
};
TORCH_MODULE(TwoOutputs);

}  // namespace

TEST_CASE("holders, Sequential, AnyModule and shared pointers are functions of a region",
          "[checkpoint][modules]") {
  const Seed seed;
  nn::Linear linear(4, 4);
  nn::Sequential sequential(linear, nn::Functional(at::relu), nn::Linear(4, 4));
  const Tensor x = leaf({2, 4});
  const auto same = [&](const nn::Module& module, auto plain, auto region) {
    const Counted done;
    require_same_grads(parameters_of(module), plain, region, x);
    CHECK(done.now().frames_created == 1);
    CHECK(done.now().recomputes == 1);
  };
  same(
      *linear, [&](const Tensor& t) { return linear(t); },
      [&](const Tensor& t) { return checkpoint(linear, t); });
  same(
      *linear, [&](const Tensor& t) { return linear(t); },
      [&](const Tensor& t) { return checkpoint(linear.ptr(), t); });
  same(
      *linear, [&](const Tensor& t) { return linear(t); },
      [&](const Tensor& t) { return checkpoint(&nn::LinearImpl::forward, linear.ptr(), t); });
  same(
      *sequential, [&](const Tensor& t) { return sequential->forward(t); },
      [&](const Tensor& t) { return checkpoint(sequential, t); });
  nn::AnyModule any(linear);
  same(
      *linear, [&](const Tensor& t) { return linear(t); },
      [&](const Tensor& t) {
        return checkpoint([&](const Tensor& u) { return any.forward<Tensor>(u); }, t);
      });
}

TEST_CASE("two thousand calls of one net in one backward have the plain grads",
          "[checkpoint][modules]") {
  const Seed seed(4);
  const bool data_requires_grad = GENERATE(true, false);
  nn::Sequential net(nn::Linear(10, 1000), nn::Functional(at::relu), nn::Linear(1000, 10));
  nn::Sequential copy = copy_of_module(net);
  const Counted done;
  Tensors outputs, plain_outputs;
  for (int i = 0; i < 2000; ++i) {
    const Tensor data = at::empty({10}).uniform_(1, 10).requires_grad_(data_requires_grad);
    outputs.push_back(checkpoint(net, data));
    plain_outputs.push_back(copy->forward(copy_of(data)));
  }
  at::stack(outputs).mean().backward();
  at::stack(plain_outputs).mean().backward();
  require_bit_equal(grads_of(*net), grads_of(*copy));
  CHECK(done.now().frames_created == 2000);
  CHECK(done.now().recomputes == 2000);
}

TEST_CASE("a checkpointed stack behind a plain layer has the plain parameter grads",
          "[checkpoint][modules]") {
  const Seed seed;
  nn::Linear first(100, 100);
  nn::Sequential rest(nn::Functional(at::relu), nn::Linear(100, 100), nn::Functional(at::relu));
  Parameters parameters{first->parameters()};
  for (const Tensor& p : rest->parameters()) parameters.tensors.push_back(p);
  const Counted done;
  require_same_grads(
      parameters, [&](const Tensor& x) { return rest->forward(first(x)); },
      [&](const Tensor& x) { return checkpoint(rest, first(x)); }, at::randn({20, 100}));
  CHECK(done.now().recomputes == 1);
}

TEST_CASE("a linear layer with a mask gives the plain outputs and grads for any result list",
          "[checkpoint][modules]") {
  const Seed seed;
  nn::Linear linear(20, 20);
  const Parameters parameters = parameters_of(*linear);
  const bool requires_grad = GENERATE(true, false);
  const bool bool_mask = GENERATE(true, false);
  const Tensor x = at::randn({4, 20}).requires_grad_(requires_grad);
  const Tensor mask = bool_mask ? at::rand({4, 20}) > 0.5 : at::rand({4, 20});
  Calls calls;
  const auto apply_mask = [](const Tensor& out, const Tensor& m) {
    return m.scalar_type() == at::kBool ? out.masked_fill(m, 0.0) : out * m;
  };
  const auto same = [&](auto fn, const auto&... inputs) {
    calls.reset();
    require_same_grads(
        parameters, fn,
        [&](const auto&... copies) { return checkpoint(counted(calls, fn), copies...); },
        inputs...);
    CHECK(calls.count() == 2);
  };
  same([&](const Tensor& t) { return linear(t); }, x);
  same([&](const Tensor& t, const Tensor& m) { return apply_mask(linear(t), m); }, x, mask);
  same([&](const Tensor& t, const Tensor& m) { return std::pair(apply_mask(linear(t), m), m); }, x,
       mask);
  same(
      [&](const Tensor& t, const Tensor& m) {
        const Tensor out = apply_mask(linear(t), m);
        return std::tuple((out * 2).detach().clone(), out, m);
      },
      x, mask);

  // With an argument that is not used.
  require_same_grads(
      parameters, [&](const Tensor& t, const Tensor& m) { return apply_mask(linear(t), m); },
      [&](const Tensor& t, const Tensor& m) {
        return checkpoint([&](const Tensor& u, const Tensor& v,
                              std::nullopt_t) { return apply_mask(linear(u), v); },
                          t, m, std::nullopt);
      },
      x, mask);
}

TEST_CASE("a module with optional arguments and four outputs has the plain values and flags",
          "[checkpoint][modules]") {
  const Seed seed;
  TwoOutputs module;
  const std::optional<Tensor> scale =
      GENERATE(true, false) ? std::optional(at::randn({20})) : std::nullopt;
  const std::optional<Tensor> mask =
      GENERATE(true, false) ? std::optional(at::rand({4, 20}) > 0.5) : std::nullopt;
  const auto in_order = [](const auto& result) {
    auto& [a, b, c, d] = result;
    return Tensors{a, b, c.value_or(Tensor()), d};
  };
  const Counted done;
  require_same_grads(
      parameters_of(*module),
      [&](const Tensor& x, const Tensor& y) { return in_order(module(x, y, scale, mask)); },
      [&](const Tensor& x, const Tensor& y) {
        return in_order(checkpoint(module, x, y, scale, mask));
      },
      leaf({4, 20}), at::randn({4, 20}));
  CHECK(done.now().recomputes == 1);
}

// ---- convolution nets ------------------------------------------------------------------------

namespace {

nn::Sequential conv_block(int64_t in, int64_t out, int64_t stride = 1) {
  return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(in, out, 3).stride(stride).padding(1)),
                        nn::PReLU());
}

// down, the levels below, up, joined with the skip connection; every level may be a region.
struct UNetLevelImpl : nn::Module {
  UNetLevelImpl(std::vector<int64_t> channels, size_t level) {
    down = register_module("down", conv_block(channels[level], channels[level + 1], 2));
    unit = register_module("unit", conv_block(channels[level + 1], channels[level + 1]));
    if (level + 2 < channels.size()) {
      below = std::make_shared<UNetLevelImpl>(channels, level + 1);
      register_module("below", below);
    }
    up = register_module(
        "up", nn::ConvTranspose2d(
                  nn::ConvTranspose2dOptions(channels[level + 1], channels[level], 2).stride(2)));
    join = register_module("join", conv_block(2 * channels[level], channels[level]));
  }
  Tensor forward(const Tensor& x) {
    Tensor inner = down->forward(x);
    inner = inner + unit->forward(inner);
    if (below) {
      inner = checkpointing ? checkpoint(below, inner) : below->forward(inner);
      calls_below += 1;
    }
    return join->forward(at::cat({x, up(inner)}, 1));
  }
  void set(bool on) {
    checkpointing = on;
    if (below) below->set(on);
  }

  nn::Sequential down{nullptr}, unit{nullptr}, join{nullptr};
  nn::ConvTranspose2d up{nullptr};
  std::shared_ptr<UNetLevelImpl> below;
  bool checkpointing = false;
  int calls_below = 0;
};
TORCH_MODULE(UNetLevel);

}  // namespace

TEST_CASE("a conv net of regions in eval mode under no grad opens no frame",
          "[checkpoint][modules]") {
  const Seed seed;
  nn::Sequential first = conv_block(3, 4), second = conv_block(4, 4, 2);
  first->eval();
  second->eval();
  const Tensor x = at::randn({1, 3, 8, 8});
  const Counted done;
  at::NoGradGuard no_grad;
  const Tensor y = checkpoint(second, checkpoint(first, x));
  CHECK(y.grad_fn() == nullptr);
  CHECK_FALSE(y.requires_grad());
  CHECK(at::equal(y, second->forward(first->forward(x))));
  CHECK(done.now().frames_created == 0);
  CHECK(done.now().recomputes == 0);
}

TEST_CASE("a UNet with a region at every skip level equals the plain one",
          "[checkpoint][modules]") {
  const Seed seed;
  UNetLevel net(std::vector<int64_t>{2, 8, 16, 32}, 0);
  const Tensor x = leaf({2, 2, 32, 32});
  const auto region = [&](const Tensor& t) {
    net->set(true);
    Tensor y = checkpoint(net, t);
    return y;
  };
  const auto plain = [&](const Tensor& t) {
    net->set(false);
    return net(t);
  };
  SECTION("eval, no grad: equal outputs") {
    net->eval();
    at::NoGradGuard no_grad;
    CHECK(at::allclose(region(x), plain(x), 1e-5, 1e-6));
  }
  SECTION("train: equal grads") {
    const Counted done;
    require_same_grads(parameters_of(*net), plain, region, x);
    CHECK(done.now().frames_created > 3);  // three levels, and those below again in recomputes

    region(x).mean().backward();
    Tensor total = at::zeros({});
    for (const Tensor& grad : grads_of(*net)) total += grad.abs().sum();
    CHECK(total.item<float>() > 0);
  }
}

// ---- normalisation and training --------------------------------------------------------------

TEST_CASE("running statistics of a BatchNorm outside the regions equal plain",
          "[checkpoint][modules]") {
  const Seed seed;
  nn::Linear linear(4, 4);
  nn::BatchNorm1d norm(4), plain_norm(4);
  const Tensor x = leaf({8, 4});
  for (int step = 0; step < 3; ++step) {
    checkpoint(linear, norm(checkpoint(linear, x))).sum().backward();
    linear(plain_norm(linear(x))).sum().backward();
  }
  require_bit_equal(norm->buffers(), plain_norm->buffers());
}

TEST_CASE("a BatchNorm in eval mode inside a region changes no statistics",
          "[checkpoint][modules]") {
  const Seed seed;
  nn::Sequential net(nn::Linear(4, 4), nn::BatchNorm1d(4), nn::Functional(at::relu));
  net->forward(at::randn({8, 4}));  // statistics that are not the initial ones
  net->eval();
  Tensors before;
  for (const Tensor& buffer : net->buffers()) before.push_back(buffer.clone());
  const Counted done;
  require_same_grads(
      parameters_of(*net), [&](const Tensor& x) { return net->forward(x); },
      [&](const Tensor& x) { return checkpoint(net, x); }, leaf({8, 4}));
  CHECK(done.now().recomputes == 1);
  require_bit_equal(net->buffers(), before);
}

namespace {

struct BlockImpl : nn::Module {
  BlockImpl() {
    register_module("norm", norm);
    register_module("attention_in", attention_in);
    register_module("attention_out", attention_out);
    register_module("up", up);
    register_module("down", down);
  }
  Tensor forward(const Tensor& x) {
    const Tensors qkv = attention_in(norm(x)).chunk(3, -1);
    const Tensor y =
        x + attention_out(at::scaled_dot_product_attention(qkv[0].unsqueeze(1), qkv[1].unsqueeze(1),
                                                           qkv[2].unsqueeze(1), {}, 0.0, true)
                              .squeeze(1));
    return y + at::dropout(down(at::gelu(up(y))), 0.1, is_training());
  }
  nn::LayerNorm norm{nn::LayerNormOptions({16})};
  nn::Linear attention_in{16, 48}, attention_out{16, 16}, up{16, 32}, down{32, 16};
};
TORCH_MODULE(Block);

struct TransformerImpl : nn::Module {
  TransformerImpl() {
    for (int i = 0; i < 3; ++i) {
      blocks.emplace_back();
      register_module("block" + std::to_string(i), blocks.back());
    }
  }
  Tensor forward(Tensor x, bool checkpointing) {
    for (Block& block : blocks) x = checkpointing ? checkpoint(block, x) : block(x);
    return x;
  }
  std::vector<Block> blocks;
};
TORCH_MODULE(Transformer);

Transformer new_transformer() {
  at::manual_seed(1);
  return Transformer();
}

// Losses of ten Adam steps.
std::vector<float> train(Transformer& model, bool checkpointing, int steps = 10) {
  at::manual_seed(2);
  const Tensor data = at::randn({4, 6, 16}), target = at::randn({4, 6, 16});
  torch::optim::Adam optimizer(model->parameters(), 1e-2);
  std::vector<float> losses;
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const Tensor loss = at::mse_loss(model(data, checkpointing), target);
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<float>());
  }
  return losses;
}

}  // namespace

TEST_CASE("ten Adam steps of a small transformer have the plain loss at every step",
          "[checkpoint][modules]") {
  const Seed seed(0);
  Transformer plain = new_transformer(), regions = new_transformer();
  const std::vector<float> expected = train(plain, false);
  CHECK(expected.back() < expected.front());
  const Counted done;
  CHECK(train(regions, true) == expected);
  CHECK(done.now().recomputes == 30);
  require_bit_equal(regions->parameters(), plain->parameters());
}

TEST_CASE("training, an evaluation under no grad and more training equal plain",
          "[checkpoint][modules]") {
  const Seed seed(0);
  std::vector<std::vector<float>> losses;
  for (const bool checkpointing : {false, true}) {
    Transformer model = new_transformer();
    std::vector<std::vector<int64_t>> shapes;
    for (const Tensor& p : model->parameters()) shapes.push_back(p.sizes().vec());
    std::vector<float> all = train(model, checkpointing, 3);
    {
      at::NoGradGuard no_grad;
      model->eval();
      all.push_back(model(at::ones({2, 6, 16}), checkpointing).sum().item<float>());
      model->train();
    }
    const std::vector<float> more = train(model, checkpointing, 3);
    all.insert(all.end(), more.begin(), more.end());
    losses.push_back(all);
    const Tensors parameters = model->parameters();
    for (size_t i = 0; i < shapes.size(); ++i) CHECK(parameters[i].sizes() == shapes[i]);
  }
  CHECK(losses[0] == losses[1]);
}
