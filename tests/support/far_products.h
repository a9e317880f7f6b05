#pragma once
// Products of matrices on the stand-in of tests/device/stand_in.h, and policies that move them.

#include "tests/support/far_tensors.h"

namespace remat::testing {

inline constexpr int64_t product_side = 16;
inline constexpr int64_t product =
    product_side * product_side * 4;  ///< bytes of a float matrix (product_side, product_side)

/// `options` that move results of any size.
inline SelectiveOptions all(SelectiveOptions options = {}) {
  options.min_offload_bytes = 0;
  return options;
}

inline Policy products(const SelectiveOptions& options = all()) {
  return remat::offload_ops({"aten::mm"}, options);
}

/// A policy that gives this answer about each product.
inline Policy answering(CheckpointPolicy answer, const SelectiveOptions& options = all()) {
  return Policy(
      [answer](const PolicyContext& question) {
        return question.op_name == "aten::mm.default" ? answer : CheckpointPolicy::PreferRecompute;
      },
      options);
}

/// Three products that backward reads, in the middle of operators that are computed again.
inline Tensor three_products(const Tensor& t) {
  Tensor h = t.sin();
  for (int i = 0; i < 3; ++i) h = h.mm(t).sin();
  return h.exp();
}

/// A kernel that no operator and no version tells of.
inline void triple_past_dispatcher(const Tensor& t) {
  auto* const data = static_cast<float*>(t.data_ptr());
  for (int64_t i = 0; i < t.numel(); ++i) data[i] *= 3;
}

}  // namespace remat::testing
