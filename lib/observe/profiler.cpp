#include "lib/observe/profiler.h"

#include <string>

#include "lib/frame/frame.h"

namespace remat::profiler {

std::unique_ptr<at::RecordFunction> begin(at::StepCallbacks observers, const Frame& frame,
                                          const char* suffix) {
  auto scope = std::make_unique<at::RecordFunction>(std::move(observers));
  const std::string name = frame.name().empty() ? "remat::checkpoint" : frame.name();
  scope->before(std::string_view(name + suffix));  // which copies it
  return scope;
}

}  // namespace remat::profiler
