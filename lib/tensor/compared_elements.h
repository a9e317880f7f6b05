#pragma once
// Takes the elements of a tensor that `ValueComparison` compares as bytes, and compares them with a
// tolerance.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "remat/options.h"

namespace remat {

/// Returns the elements that `rule` compares, as bytes that `first_difference` reads. All NaN have
/// the same bits if the rule treats them as equal. Elements that cannot be compared with a
/// tolerance are replaced by a hash. Copies the elements.
std::string compared_elements(const at::Tensor& tensor, const ValueComparison& rule);

struct ElementDifference {
  int64_t number = 0;        ///< among the compared elements
  int64_t num_compared = 0;  ///< in that part of the tensor
  std::string forward, recompute;
};

/// Returns the first element that differs by more than the tolerance between two results of
/// `compared_elements`.
std::optional<ElementDifference> first_difference(const std::string& forward,
                                                  const std::string& recompute,
                                                  const ValueComparison& rule);

}  // namespace remat
