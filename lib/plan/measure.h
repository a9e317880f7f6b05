#pragma once
// What a step of a whole chain takes, beside what its stages cost.

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "remat/plan.h"

namespace remat {

/// The peak [bytes] of a forward and backward beyond what is there before, the input and gradients of leaves.
/// Puts back what `measure` puts back; throws what the chain throws.
int64_t measure_peak(const Stage& chain, const at::Tensor& sample, const MeasureOptions& options);

}  // namespace remat
