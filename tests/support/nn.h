#pragma once
// support.h and torch::nn, for the tests that need modules.

#include <torch/nn.h>

#include <functional>
#include <optional>

#include "remat/module.h"
#include "remat/sequential.h"
#include "tests/support/support.h"

namespace remat::testing {

/// Returns the parameters of a module, for `require_same_grads`.
inline Parameters parameters_of(const torch::nn::Module& module) { return {module.parameters()}; }

/// The regions that a call opens.
inline int64_t frames_of(const std::function<Tensor()>& call) {
  const Counted done;
  const Tensor y = call();
  return done.now().frames_created;
}

/// A module whose second and third argument may be left out.
struct ScaledImpl : torch::nn::Module {
  ScaledImpl() { register_module("linear", linear); }
  Tensor forward(const Tensor& x, double scale = 2.0, std::optional<Tensor> shift = {}) {
    const Tensor y = linear(x).exp() * scale;
    return shift ? y + *shift : y;
  }
  torch::nn::Linear linear{4, 4};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(2.0)},
                           {2, torch::nn::AnyValue(std::optional<Tensor>())})
};

}  // namespace remat::testing
