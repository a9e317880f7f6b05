#pragma once
// LibTorch's warnings, collected instead of printed.

#include <c10/util/Exception.h>

#include <string>
#include <vector>

namespace remat::testing {

/// Collects the thread's warnings for its lifetime, each time they occur.
struct Warnings : c10::WarningHandler {
  Warnings() : guard(this) { c10::WarningUtils::set_warnAlways(true); }
  ~Warnings() override { c10::WarningUtils::set_warnAlways(false); }
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;
  c10::WarningUtils::WarningHandlerGuard guard;
};

}  // namespace remat::testing
