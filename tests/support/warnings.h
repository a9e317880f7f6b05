#pragma once
// What LibTorch warns of, as text.

#include <c10/util/Exception.h>

#include <string>

namespace remat::testing {

/// The warnings that `f` gives on this thread, also those that are given once.
template <class F>
std::string warnings_of(F&& f) {
  struct Warnings : c10::WarningHandler {
    void process(const c10::Warning& warning) override { text += warning.msg() + "\n"; }
    std::string text;
  } warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  c10::WarningUtils::set_warnAlways(true);
  struct Once {
    ~Once() { c10::WarningUtils::set_warnAlways(false); }
  } const once;
  f();
  return warnings.text;
}

}  // namespace remat::testing
