#include "lib/scope/profiler.h"

#include <string>

namespace remat::profiler {

std::unique_ptr<at::RecordFunction> begin(at::StepCallbacks observers, const RegionInfo& region,
                                          const char* suffix) {
  auto scope = std::make_unique<at::RecordFunction>(std::move(observers));
  const std::string name = (region.name().empty() ? "remat::checkpoint" : region.name()) + suffix;
  scope->before(name.c_str());  // copies it, in every LibTorch
  return scope;
}

}  // namespace remat::profiler
