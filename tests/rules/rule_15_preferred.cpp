// Rule 15: a result that a policy prefers to keep, and that is changed in place, is computed again.

#include "tests/support/nn.h"
#include "tests/support/support.h"

namespace {

using remat::CheckpointError;
using remat::CheckpointPolicy;
using remat::Policy;

/// A block of an EfficientNet: the activations overwrite what the batch norm and two of the four
/// convolutions have made.
struct ConvBlock : torch::nn::Module {
  ConvBlock() {
    const auto conv = [this](const char* name, int64_t in, int64_t out, int64_t kernel) {
      return register_module(
          name,
          torch::nn::Conv2d(
              torch::nn::Conv2dOptions(in, out, kernel).padding(kernel / 2).bias(kernel == 1)));
    };
    expand = conv("expand", 4, 8, 3);
    norm = register_module("norm", torch::nn::BatchNorm2d(8));
    reduce = conv("reduce", 8, 2, 1);
    excite = conv("excite", 2, 8, 1);
    project = conv("project", 8, 4, 3);
  }
  Tensor forward(const Tensor& x) {
    Tensor h = norm(expand(x)), squeezed;
    at::silu_(h);
    squeezed = reduce(h.mean({2, 3}, true));
    Tensor y = project(h * excite(at::silu_(squeezed)).sigmoid());
    return at::silu_(y);
  }
  torch::nn::Conv2d expand{nullptr}, reduce{nullptr}, excite{nullptr}, project{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
};

TEST_CASE("matmuls that an activation overwrites are computed again, the others are kept",
          "[rule-15][policy]") {
  torch::manual_seed(1);
  const auto block = std::make_shared<ConvBlock>();
  const Tensor x = leaf({2, 4, 6, 6});
  Tensors leaves = block->parameters();
  leaves.push_back(x);
  const Tensors plain = grad_of(block->forward(x), leaves);
  OpCounter ops;
  const Tensor y = remat::checkpoint({.policy = remat::save_matmuls()}, block, x);
  CHECK(ops.count("aten::_convolution") == 4);
  for (int i = 0; i < 2; ++i) {
    ops.reset();
    require_bit_equal(grad_of(y, leaves, {.retain_graph = true}), plain);
    // `expand` and `excite` are kept; `reduce` and `project` run again.
    CHECK(ops.count("aten::_convolution") == 2);
  }
}

TEST_CASE("a result that is changed after forward is computed again if keeping it is preferred",
          "[rule-15]") {
  const Tensor x = leaf({4, 4});
  const auto f = [](const Tensor& x) {
    const Tensor product = x.mm(x);
    return std::pair(product, (product * 2).sin());  // autograd saves no product
  };
  const auto sum_of = [](std::pair<Tensor, Tensor> results) {
    results.first.mul_(2);
    return results.first.sum() + results.second.sum();
  };
  const Tensors plain = grad_of(sum_of(f(x)), {x});
  const auto region = [&](const Policy& policy) {
    return sum_of(remat::checkpoint({.policy = policy}, f, x));
  };
  KernelCounter kernels;
  const Tensor y = region(remat::save_matmuls());
  kernels.reset();
  require_bit_equal(grad_of(y, {x}), plain);
  CHECK(kernels.count("mm") == 3);  // the recompute's, and two of backward's own
  const Tensor z = region(remat::save_ops({"aten::mm"}));
  const auto error = error_of<CheckpointError>([&] { grad_of(z, {x}); });
  CHECK(error.kind() == CheckpointError::Kind::SelectiveMutation);
}

TEST_CASE("what is not kept after all holds no bytes", "[rule-15]") {
  const Tensor x = leaf({64, 64});
  constexpr int64_t matrix = 64 * 64 * 4;
  const auto f = [](const Tensor& x) {
    Tensor a = x.mm(x), b = x.mm(x);
    return a.sin() * b.sigmoid_();
  };
  const auto answering = [](CheckpointPolicy answer) {
    return Policy([answer](const remat::PolicyContext& call) {
      return call.op_name == "aten::mm.default" ? answer : CheckpointPolicy::PreferRecompute;
    });
  };
  const LiveBytes bytes;
  const Tensor y = remat::checkpoint({.policy = answering(CheckpointPolicy::PreferSave)}, f, x);
  CHECK(bytes.held() == 2 * matrix);  // the result, and `a`
  require_bit_equal(grad_of(y, {x}), grad_of(f(x), {x}));
  const Tensor z = remat::checkpoint({.policy = answering(CheckpointPolicy::MustSave)}, f, x);
  const auto error = error_of<CheckpointError>([&] { grad_of(z, {x}); });
  CHECK(error.kind() == CheckpointError::Kind::SelectiveMutation);
}

TEST_CASE("a preferred result that a name keeps as well may not be changed", "[rule-15]") {
  const Tensor x = leaf({4, 4});
  const auto f = [](const Tensor& x) {
    Tensor y = remat::checkpoint_name(x.mm(x), "product");
    return at::silu_(y) * x;
  };
  const auto region = [&](const Policy& policy) {
    return remat::checkpoint({.policy = policy}, f, x);
  };
  require_bit_equal(grad_of(region(remat::save_matmuls()), {x}), grad_of(f(x), {x}));
  for (const Policy& policy :
       {remat::save_names({"product"}), remat::save_matmuls() | remat::save_names({"product"})}) {
    const Tensor y = region(policy);
    const auto error = error_of<CheckpointError>([&] { grad_of(y, {x}); });
    CHECK(error.kind() == CheckpointError::Kind::SelectiveMutation);
  }
}

}  // namespace
