// A budget from the free memory of a device.

#include <cmath>

#include "remat/memory.h"
#include "remat/plan.h"

namespace remat {

int64_t free_budget(const ChainCost& cost, c10::Device device, double margin) {
  TORCH_CHECK_VALUE(margin >= 0 && margin < 1,
                    "remat::free_budget: the margin must be in [0, 1), got ", margin, ".");
  TORCH_CHECK_VALUE(std::isfinite(cost.rounding) && cost.rounding >= 0,
                    "remat::free_budget: ChainCost::rounding must be finite and at least 0, got ",
                    cost.rounding, ".");
  const auto free = static_cast<double>(free_bytes(device));
  return static_cast<int64_t>(std::floor(free * (1 - margin) / (1 + cost.rounding)));
}

}  // namespace remat
