#pragma once
// Settings that only tests and benches change.

#include <cstdint>

#include "remat/budget_trial.h"

namespace remat::budget {

/// The settings of the process. Guarded by the graph's lock.
struct Trial {
  static Trial& get() {
    static Trial trial;
    return trial;
  }
  Choice choice = Choice::Reverse;
  uint64_t seed = 0;
  bool counts_work = false;
  Work work{};
};

}  // namespace remat::budget
