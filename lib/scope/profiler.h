#pragma once
// The runs of a region as scopes of LibTorch's profiler, and of other observers of its
// RecordFunction.

#include <ATen/record_function.h>

#include <memory>
#include <utility>

#include "lib/scope/region_info.h"

namespace remat {

namespace profiler {

std::unique_ptr<at::RecordFunction> begin(at::StepCallbacks observers, const RegionInfo& region,
                                          const char* suffix);

/// Returns a scope that ends when it dies, named after the region ("remat::checkpoint" without a
/// name) and `suffix`. Null without an observer, which costs one look at the thread's callbacks.
inline std::unique_ptr<at::RecordFunction> scope_of(const RegionInfo& region, const char* suffix) {
  auto observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  return observers ? begin(std::move(*observers), region, suffix) : nullptr;
}
/// Returns the scope of the first run, shown as "NAME (forward)" on the thread that runs the
/// region.
inline auto forward_scope(const RegionInfo& region) { return scope_of(region, " (forward)"); }
/// Returns the scope of a recompute, shown as "NAME". The scope begins before the inputs are there,
/// so it includes the recomputes of regions around for which it waits, like
/// RegionReport::recompute_s.
inline auto recompute_scope(const RegionInfo& region) { return scope_of(region, ""); }

}  // namespace profiler

}  // namespace remat
