#pragma once
// REMAT_INVARIANT: an assertion whose failure is our bug, reported with ids and versions.

#include <fmt/format.h>

#include <string>

namespace remat {

[[noreturn]] void report_broken_invariant(const char* condition, const char* file, int line,
                                          const std::string& message);

}  // namespace remat

#define REMAT_INVARIANT(cond, ...)                                                             \
  do {                                                                                         \
    if (!(cond)) [[unlikely]]                                                                  \
      ::remat::report_broken_invariant(#cond, __FILE__, __LINE__, ::fmt::format(__VA_ARGS__)); \
  } while (false)
