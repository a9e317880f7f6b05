#pragma once
// Which region one is: its number, how deep it is nested, its name.

#include <cstdint>
#include <string>

namespace remat {

struct RegionInfo {
  int64_t id = -1;  ///< of its frame, unique in the process
  const std::string* given_name = nullptr;
  int32_t depth = 0;  ///< 1: no region around it

  /// Empty if it has none.
  const std::string& name() const {
    static const std::string none;
    return given_name == nullptr ? none : *given_name;
  }
};

}  // namespace remat
