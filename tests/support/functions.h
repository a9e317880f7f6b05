#pragma once
// Functions of tensors that several tests run as regions, and their backwards.

#include "tests/support/support.h"

namespace remat::testing {

inline Tensor sine(Tensor x) { return x.sin(); }
/// `count` sines in a row, each of which saves its input.
inline Tensor sines(Tensor x, int count) {
  for (int i = 0; i < count; ++i) x = x.sin();
  return x;
}
inline Tensor two_sins(const Tensor& x) { return sines(x, 2); }
inline Tensor sin_exp_sin(const Tensor& x) { return x.sin().exp().sin(); }
inline Tensor dropout(const Tensor& x, double p = 0.5) { return at::dropout(x, p, /*train=*/true); }

/// States whether a test runs a backward through a graph, and whether that retains the graph.
enum class Backward { None, Once, Retained };

inline void run_backward(Backward backward, const Tensor& y) {
  if (backward != Backward::None) y.sum().backward({}, backward == Backward::Retained);
}

}  // namespace remat::testing
