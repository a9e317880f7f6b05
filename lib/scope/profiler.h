#pragma once
// The runs of a region as scopes of LibTorch's own profiler, and of whoever else observes its
// RecordFunction.

#include <ATen/record_function.h>

#include <memory>
#include <utility>

#include "lib/scope/region_info.h"

namespace remat {

namespace profiler {

std::unique_ptr<at::RecordFunction> begin(at::StepCallbacks observers, const RegionInfo& region,
                                          const char* suffix);

/// A scope that ends when it dies, under the region's name ("remat::checkpoint" without one) and
/// `suffix`; null where nobody observes, which costs one look at the thread's callbacks.
inline std::unique_ptr<at::RecordFunction> scope_of(const RegionInfo& region, const char* suffix) {
  auto observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  return observers ? begin(std::move(*observers), region, suffix) : nullptr;
}
/// The first run is shown as "NAME (forward)". It is seen on the thread that runs the region.
inline auto forward_scope(const RegionInfo& region) { return scope_of(region, " (forward)"); }
/// A recompute is shown as "NAME". It begins before the inputs are there, so it holds the
/// recomputes of the regions around that it waits for, as RegionReport::recompute_s does.
inline auto recompute_scope(const RegionInfo& region) { return scope_of(region, ""); }

}  // namespace profiler

}  // namespace remat
