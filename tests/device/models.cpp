// Models of torch::nn on the stand-in, in float32 and by autocast in bfloat16: gradients, bytes,
// plans.

#include <ATen/autocast_mode.h>

#include <string>
#include <vector>

#include "tests/device/stand_in.h"
#include "tests/support/autocast.h"
#include "tests/support/nn.h"

using remat::MemoryMeter;
using remat::Plan;
using remat::Stage;

namespace {

constexpr int64_t batch = 2;

constexpr int64_t width = 16, heads = 2, length = 8, vocabulary = 17, num_blocks = 4;

struct Target {
  at::Device device;
  at::ScalarType dtype;
};

/// Operators that autocast knows compute in the target's precision, without a cache of casts.
AutocastOptions precision_of(const Target& target) {
  return {.device = target.device.type(), .enabled = target.dtype != at::kFloat, .cache = false};
}

enum class Checkpointing { None, EveryBlock, NestedGroups, SaveMatmuls, SaveByName };

/// A block of a transformer, as in the demo: x + attention(norm(x)), then x + mlp(norm(x)).
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(double dropout) {
    const torch::nn::LayerNormOptions normed({width});
    first_norm = register_module("first_norm", torch::nn::LayerNorm(normed));
    second_norm = register_module("second_norm", torch::nn::LayerNorm(normed));
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
    mlp = register_module(
        "mlp",
        torch::nn::Sequential(torch::nn::Linear(width, 4 * width), torch::nn::GELU(),
                              torch::nn::Linear(4 * width, width), torch::nn::Dropout(dropout)));
  }
  Tensor forward(const Tensor& x) {
    const auto parts = qkv(first_norm(x))
                           .view({batch, length, 3, heads, width / heads})
                           .permute({2, 0, 3, 1, 4})
                           .unbind(0);
    const Tensor mixed = remat::checkpoint_name(
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true), "mixed");
    const Tensor y = x + mixed.transpose(1, 2).reshape({batch, length, width});
    return y + mlp->forward(second_norm(y));
  }
  torch::nn::LayerNorm first_norm = nullptr, second_norm = nullptr;
  torch::nn::Linear qkv = nullptr;
  torch::nn::Sequential mlp = nullptr;
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(double dropout) {
    embedding = register_module("embedding", torch::nn::Embedding(vocabulary, width));
    for (int64_t i = 0; i < num_blocks; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Block(dropout)));
    output = register_module("output", torch::nn::Linear(width, vocabulary));
  }
  /// Returns the stages of a chain, the last of which is the loss.
  std::vector<Stage> stages(const Tensor& targets) {
    std::vector<Stage> all{[this](const Tensor& ids) { return embedding(ids); }};
    for (Block& each : blocks)
      all.emplace_back([each](const Tensor& x) mutable { return each(x); });
    all.emplace_back([this](const Tensor& x) { return output(x); });
    all.emplace_back([targets](const Tensor& scores) {
      return at::cross_entropy_loss(scores.flatten(0, 1), targets.flatten());
    });
    return all;
  }
  Tensor loss(const Tensor& ids, const Tensor& targets, Checkpointing way) {
    Tensor x = embedding(ids);
    const auto regions = [](std::vector<Block> some, Tensor y) {
      for (Block& each : some) y = remat::checkpoint(each, y);
      return y;
    };
    switch (way) {
      case Checkpointing::None:
        for (Block& each : blocks) x = each(x);
        break;
      case Checkpointing::EveryBlock:
        x = regions(blocks, x);
        break;
      case Checkpointing::NestedGroups:
        for (int i : {0, 2})
          x = remat::checkpoint(regions, std::vector<Block>{blocks[i], blocks[i + 1]}, x);
        break;
      case Checkpointing::SaveMatmuls:
        for (Block& each : blocks)
          x = remat::checkpoint({.policy = remat::save_matmuls()}, each, x);
        break;
      case Checkpointing::SaveByName:
        for (Block& each : blocks)
          x = remat::checkpoint({.policy = remat::save_names({"mixed"})}, each, x);
    }
    return at::cross_entropy_loss(output(x).flatten(0, 1), targets.flatten());
  }
  torch::nn::Embedding embedding = nullptr;
  std::vector<Block> blocks;
  torch::nn::Linear output = nullptr;
};
TORCH_MODULE(Model);

/// Attention is one kernel on the CPU and several elsewhere. For its lifetime it is several
/// everywhere.
class SeveralKernels {
 public:
  SeveralKernels() { at::globalContext().setSDPUseFlash(false); }
  ~SeveralKernels() { at::globalContext().setSDPUseFlash(was_one_); }
  SeveralKernels& operator=(SeveralKernels&&) = delete;

 private:
  const bool was_one_ = at::globalContext().userEnabledFlashSDP();
};

struct Step {
  int64_t held_bytes = 0, peak_bytes = 0;
  std::vector<Tensor> gradients{};  ///< on the CPU
};

/// Runs one step of the model, with the seed's dropout.
Step step(const Target& target, Checkpointing way, double dropout) {
  const MemoryMeter first(target.device);
  at::manual_seed(3);
  Model model(dropout);
  model->to(target.device);
  const Tensor ids = at::randint(vocabulary, {batch, length + 1}, at::kLong).to(target.device);
  const Tensor inputs = ids.narrow(1, 0, length).contiguous(),
               targets = ids.narrow(1, 1, length).clone();
  for (Tensor& each : model->parameters()) each.mutable_grad() = at::zeros_like(each);
  if (!target.device.is_cpu()) stand_in::live_bytes();
  MemoryMeter meter(target.device);
  const int64_t before = meter.live_bytes();
  Step done;
  {
    at::manual_seed(4);
    const Tensor loss = [&] {
      const Autocast autocast(precision_of(target));
      return model->loss(inputs, targets, way);
    }();
    done.held_bytes = meter.live_bytes() - before;
    loss.backward();
  }
  done.peak_bytes = meter.peak_bytes() - before;
  for (const Tensor& each : model->parameters()) {
    REQUIRE(each.device() == target.device);
    REQUIRE(each.grad().device() == target.device);
    done.gradients.push_back(each.grad().cpu());
  }
  return done;
}

}  // namespace

TEST_CASE("modules move to a plug-in's device and back", "[device][models]") {
  torch::nn::Sequential net(torch::nn::Linear(3, 5), torch::nn::BatchNorm1d(5), torch::nn::GELU(),
                            torch::nn::Linear(5, 2));
  const Tensor x = at::randn({4, 3});
  const Tensor y = net->forward(x);
  const Tensors plain = torch::autograd::grad({y.square().sum()}, net->parameters());
  const auto before = net->parameters();
  std::vector<at::TensorImpl*> objects;
  for (const Tensor& each : before) objects.push_back(each.unsafeGetTensorImpl());
  net->to(stand_in::device(1));
  for (std::size_t i = 0; i < before.size(); ++i) {
    CHECK(net->parameters()[i].device() == stand_in::device(1));
    CHECK(net->parameters()[i].unsafeGetTensorImpl() == objects[i]);  // as an optimizer has it
  }
  const Tensor there =
      remat::checkpoint(net, x.to(stand_in::device(1)).requires_grad_());  // as plain, then again
  const Tensors gradients = torch::autograd::grad({there.square().sum()}, net->parameters());
  for (std::size_t i = 0; i < plain.size(); ++i) CHECK(bit_equal(gradients[i].cpu(), plain[i]));
  net->to(at::kCPU);
  CHECK(net->parameters()[0].is_cpu());
}

TEST_CASE("running statistics of a module on a device are put back after a recompute",
          "[device][models]") {
  const auto statistics_after = [](bool is_checkpointed) {
    at::manual_seed(5);
    torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 3, 3).padding(1)),
                              torch::nn::BatchNorm2d(3), torch::nn::SiLU());
    net->to(stand_in::device());
    const Tensor x = at::randn({2, 2, 4, 4}).to(stand_in::device()).requires_grad_();
    for (int i = 0; i < 2; ++i) {
      const Tensor y = is_checkpointed ? remat::checkpoint(net, x) : net->forward(x);
      y.square().sum().backward();
    }
    std::vector<Tensor> all{x.grad().cpu()};
    for (const Tensor& each : net->parameters()) all.push_back(each.grad().cpu());
    for (const Tensor& each : net->buffers()) all.push_back(each.cpu());
    return all;
  };
  const std::vector<Tensor> plain = statistics_after(false);
  CHECK(plain[5].abs().sum().item<float>() > 0);  // the running mean
  require_bit_equal(statistics_after(true), plain);
}

TEST_CASE("a transformer trains on a device as on the CPU, in its bytes", "[device][models]") {
  const SeveralKernels kernels;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    INFO(dtype);
    const Step cpu = step({at::kCPU, dtype}, Checkpointing::None, 0);
    const Step plain = step({stand_in::device(), dtype}, Checkpointing::None, 0);
    // A single kernel on the CPU may be several here, with other rounding.
    for (std::size_t i = 0; i < cpu.gradients.size(); ++i)
      CHECK(at::allclose(plain.gradients[i], cpu.gradients[i], dtype == at::kFloat ? 1e-4 : 0.1,
                         dtype == at::kFloat ? 1e-6 : 1e-2));
    // An accelerator's autocast computes the loss in float, but the CPU's does not. The difference
    // is the saved logarithms.
    const int64_t more = dtype == at::kFloat ? 0 : batch * length * vocabulary * 2;
    CHECK(plain.held_bytes == cpu.held_bytes + more);
    for (const Checkpointing way : {Checkpointing::EveryBlock, Checkpointing::NestedGroups,
                                    Checkpointing::SaveMatmuls, Checkpointing::SaveByName}) {
      INFO("way " << static_cast<int>(way));
      const Step there = step({stand_in::device(), dtype}, way, 0);
      require_bit_equal(there.gradients, plain.gradients);
      CHECK(there.held_bytes == step({at::kCPU, dtype}, way, 0).held_bytes + more);
      CHECK(there.held_bytes < plain.held_bytes);
      CHECK(there.peak_bytes < plain.peak_bytes);
    }
  }
}

TEST_CASE("recomputes of a model on a device draw the dropout of its generator again",
          "[device][models]") {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const Target target{stand_in::device(), dtype};
    const Step plain = step(target, Checkpointing::None, 0.1);
    const uint64_t drawn = stand_in::position();
    CHECK(drawn > 0);
    for (const Checkpointing way : {Checkpointing::EveryBlock, Checkpointing::NestedGroups,
                                    Checkpointing::SaveMatmuls, Checkpointing::SaveByName}) {
      INFO("way " << static_cast<int>(way));
      require_bit_equal(step(target, way, 0.1).gradients, plain.gradients);
      CHECK(stand_in::position() == drawn);
    }
    // Dropout is on: other numbers give other gradients.
    CHECK_FALSE(bit_equal(step(target, Checkpointing::None, 0).gradients[0], plain.gradients[0]));
  }
}

TEST_CASE("forward and recompute cast alike under a device's autocast", "[device][models]") {
  const Tensor weight = at::randn({6, 6}).to(stand_in::device()).requires_grad_();
  std::vector<at::ScalarType> seen;
  const auto layer = [&](const Tensor& x) {
    const Tensor product = x.matmul(weight);  // cast
    seen.push_back(product.scalar_type());
    const Tensor wide = product.softmax(1);  // in float again
    seen.push_back(wide.scalar_type());
    const Tensor again = at::cat({wide, product}, 1).matmul(at::cat({weight, weight}, 0));
    seen.push_back(again.scalar_type());
    return again.sin();
  };
  const Tensor x = at::randn({3, 6}).to(stand_in::device()).requires_grad_();
  const Target target{stand_in::device(), at::kBFloat16};
  const auto gradients = [&](bool is_checkpointed) {
    const Tensor y = [&] {
      const Autocast autocast(precision_of(target));
      return is_checkpointed ? remat::checkpoint(layer, x) : layer(x);
    }();
    CHECK(y.scalar_type() == at::kBFloat16);
    // Autocast is off here.
    return torch::autograd::grad({y.to(at::kFloat).square().sum()}, {x, weight});
  };
  const Tensors plain = gradients(false);
  const std::vector<at::ScalarType> casts{at::kBFloat16, at::kFloat, at::kBFloat16};
  CHECK(seen == casts);
  seen.clear();
  const int64_t products = stand_in::num_kernels("aten::mm");
  const Tensors checkpointed = gradients(true);
  // Two in forward, two in the recompute, and two for each of the two gradients.
  CHECK(stand_in::num_kernels("aten::mm") == products + 2 + 2 + 4);
  const std::vector<at::ScalarType> twice{at::kBFloat16, at::kFloat, at::kBFloat16,
                                          at::kBFloat16, at::kFloat, at::kBFloat16};
  CHECK(seen == twice);
  require_bit_equal({checkpointed[0].cpu(), checkpointed[1].cpu()},
                    {plain[0].cpu(), plain[1].cpu()});
  CHECK(checkpointed[1].scalar_type() == at::kFloat);
  // The same layer without autocast has another gradient.
  const Tensor wide = torch::autograd::grad({layer(x).square().sum()}, {weight})[0];
  CHECK_FALSE(bit_equal(wide.cpu(), plain[1].cpu()));
}

TEST_CASE("a recompute casts as forward did when autocast has changed since", "[device][models]") {
  const Tensor weight = at::randn({4, 4}).to(stand_in::device()).requires_grad_();
  const auto layer = [&](const Tensor& x) { return x.matmul(weight).sin().matmul(weight); };
  const Tensor x = at::randn({2, 4}).to(stand_in::device()).requires_grad_();
  const auto run = [&](bool is_checkpointed, at::ScalarType then) {
    const Tensor y = [&] {
      const Autocast autocast(precision_of({stand_in::device(), at::kBFloat16}));
      return is_checkpointed ? remat::checkpoint(layer, x) : layer(x);
    }();
    const Autocast other(precision_of({stand_in::device(), then}));
    return torch::autograd::grad({y}, {x, weight}, {at::ones_like(y)});
  };
  for (const at::ScalarType then : {at::kFloat, at::kBFloat16}) {
    const Tensors plain = run(false, then), again = run(true, then);
    for (std::size_t i = 0; i < plain.size(); ++i) CHECK(bit_equal(again[i].cpu(), plain[i].cpu()));
  }
}

TEST_CASE("plans of a transformer peak on a device as predicted, to the byte",
          "[device][models][plan]") {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    INFO(dtype);
    const Target target{stand_in::device(), dtype};
    at::manual_seed(6);
    Model model(0.1);
    model->to(target.device);
    for (Tensor& each : model->parameters()) each.mutable_grad() = at::zeros_like(each);
    const Tensor ids = at::randint(vocabulary, {batch, length + 1}, at::kLong).to(target.device);
    const Tensor inputs = ids.narrow(1, 0, length).contiguous();
    std::vector<Stage> stages = model->stages(ids.narrow(1, 1, length).clone());
    for (Stage& each : stages)
      each = [stage = each, target](const Tensor& x) {
        const Autocast autocast(precision_of(target));
        return stage(x);
      };
    const auto count = static_cast<int64_t>(stages.size());
    const auto gradients_of = [&](const Plan& plan) {
      at::manual_seed(7);
      model->zero_grad(/*set_to_none=*/false);
      remat::run(plan, stages, inputs).backward();
      std::vector<Tensor> all;
      for (const Tensor& each : model->parameters()) all.push_back(each.grad().cpu());
      return all;
    };
    const remat::ChainCost cost = remat::measure(stages, inputs, {.repeats = 1});
    const remat::Frontier frontier = remat::solve(cost);
    const std::vector<Tensor> plain = gradients_of(Plan(count));
    REQUIRE(frontier.points().size() >= 4);
    for (const remat::FrontierPoint& point : frontier.points()) {
      const Plan plan = frontier.plan(point.bytes);
      INFO(plan.to_string());
      stand_in::live_bytes();
      MemoryMeter meter(target.device);
      const int64_t before = meter.live_bytes();
      const std::vector<Tensor> gradients = gradients_of(plan);
      const int64_t peak = meter.peak_bytes() - before;
      require_bit_equal(gradients, plain);
      // The caller holds the loss and its gradient to the end.
      CHECK(peak >= point.bytes);
      CHECK(peak <= point.bytes + 8);
    }
  }
}
