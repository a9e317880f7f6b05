// A consumer of the core alone: a region with dropout, a nest, and an option whose layer is absent.

#include <ATen/ATen.h>
#include <remat/checkpoint.h>
#include <remat/hooks.h>
#include <remat/module.h>
#include <remat/sequential.h>
#include <remat/state.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdio>
#include <string>

namespace {

bool fails(const char* what) {
  std::printf("wrong: %s\n", what);
  return true;
}

}  // namespace

int main() {
  const at::Tensor x = at::randn({64, 64}).requires_grad_();
  const auto block = [](at::Tensor t) {
    for (int i = 0; i < 5; ++i) t = at::dropout(t.tanh(), 0.3, /*train=*/true);
    return t.sin().exp();
  };
  const auto gradient = [&](auto&& forward) {
    at::manual_seed(3);
    return torch::autograd::grad({forward(x).sum()}, {x})[0];
  };
  const at::Tensor plain = gradient(block);
  const auto region = [&](const at::Tensor& t) { return remat::checkpoint(block, t); };
  if (!gradient(region).equal(plain)) return fails("the gradient of a region");
  const auto nest = [&](const at::Tensor& t) { return remat::checkpoint(region, t); };
  if (!gradient(nest).equal(plain)) return fails("the gradient of a nest");
  try {
    remat::checkpoint({.offload_inputs = true}, block, x);
  } catch (const remat::CheckpointError& error) {
    if (error.kind() != remat::CheckpointError::Kind::Unsupported)
      return fails("the kind of error");
    std::puts("the core works alone");
    return 0;
  }
  return fails("an option without its layer was ignored");
}
