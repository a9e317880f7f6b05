#pragma once
// Maps of tensors that are composed: c(f) runs f in a region, grad(f) is its derivative, so that
// grad(c(grad(f))) is a gradient of a region that takes one inside.

#include <functional>
#include <optional>
#include <utility>

#include "tests/support/support.h"

namespace remat::testing {

using Map = std::function<Tensor(const Tensor&)>;

/// `f` in a region.
inline Map c(Map f) {
  return [f = std::move(f)](const Tensor& x) { return remat::checkpoint(f, x); };
}
/// d f(x) / d x as a differentiable map.
inline Map grad(Map f) {
  return [f = std::move(f)](const Tensor& x) {
    return torch::autograd::grad({f(x).sum()}, {x}, {}, std::nullopt, /*create_graph=*/true)[0];
  };
}

}  // namespace remat::testing
