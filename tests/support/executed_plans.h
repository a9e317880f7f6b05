#pragma once
// Plans that are run, and plans that are refused.

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/support/support.h"

namespace remat::testing {

struct Executed {
  int64_t peak_bytes = 0;
  Tensor gradient;
};

/// Forward and backward; the peak beyond the input, which exists before.
inline Executed execute(const Plan& plan, const std::vector<Stage>& stages, const Tensor& x,
                        const CheckpointOptions& options = {}, const MoveOptions& moving = {}) {
  x.mutable_grad() = Tensor();
  LiveBytes bytes;
  remat::run(plan, stages, x, options, moving).backward();
  return {bytes.peak(), std::exchange(x.mutable_grad(), Tensor())};
}

inline std::string error_of_parse(std::string_view text) {
  return text_of(error_of<c10::ValueError>([&] { static_cast<void>(Plan::parse(text)); }));
}

}  // namespace remat::testing
