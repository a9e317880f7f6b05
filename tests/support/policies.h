#pragma once
// Options of regions with a policy, and the errors of such regions.

#include <string>
#include <utility>
#include <vector>

#include "tests/support/support.h"

namespace remat::testing {

inline CheckpointOptions with(Policy policy, bool early_stop = true) {
  return {.early_stop = early_stop, .policy = std::move(policy)};
}

/// Keeps the results of these operators.
inline CheckpointOptions saving(std::vector<std::string> ops, SelectiveOptions options = {},
                                bool early_stop = true) {
  return with(remat::save_ops(std::move(ops), options), early_stop);
}

/// A policy that keeps the result of every operator.
inline Policy everything(SelectiveOptions options = {}) {
  return Policy([](const PolicyContext&) { return CheckpointPolicy::MustSave; }, options);
}

/// The kind of the error that a backward throws.
inline CheckpointError::Kind kind_of(const Tensor& y, const Tensors& inputs) {
  return error_of<CheckpointError>([&] { grad_of(y, inputs); }).kind();
}

}  // namespace remat::testing
