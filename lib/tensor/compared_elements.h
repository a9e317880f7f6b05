#pragma once
// The elements of a tensor that `ValueComparison` compares: taken as bytes, and compared with a
// tolerance.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "remat/options.h"

namespace remat {

/// The elements that `rule` compares, as bytes that `first_difference` reads. All NaN have the same
/// bits if the rule finds them equal. Of what cannot be compared with a tolerance a hash. Copies
/// what it takes.
std::string compared_elements(const at::Tensor& tensor, const ValueComparison& rule);

struct ElementDifference {
  int64_t number = 0;        ///< of those that are compared
  int64_t num_compared = 0;  ///< in that part of the tensor
  std::string forward, recompute;
};

/// The first element in which what `compared_elements` took of two tensors differs by more than the
/// tolerance.
std::optional<ElementDifference> first_difference(const std::string& forward,
                                                  const std::string& recompute,
                                                  const ValueComparison& rule);

}  // namespace remat
