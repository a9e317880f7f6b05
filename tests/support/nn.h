#pragma once
// support.h and torch::nn, for the tests that need modules.

#include <torch/nn.h>

#include "remat/module.h"
#include "remat/sequential.h"
#include "tests/support/support.h"

namespace remat::testing {

/// Returns the parameters of a module, for `require_same_grads`.
inline Parameters parameters_of(const torch::nn::Module& module) { return {module.parameters()}; }

}  // namespace remat::testing
