#pragma once
// Which region one is: its number, how deep it is nested, its name.

#include <cstdint>
#include <string>
#include <typeinfo>

namespace remat {

/// What a region is called: as its options say, or by a type, of which a name is made when somebody
/// asks for it.
class RegionName {
 public:
  RegionName() = default;
  /// The text lives as long as the name is asked for.
  explicit RegionName(const std::string* given) : word_(reinterpret_cast<uintptr_t>(given)) {}
  /// Null: it has no name.
  explicit RegionName(const std::type_info* type)
      : word_(type == nullptr ? 0 : reinterpret_cast<uintptr_t>(type) | is_type) {}
  /// Empty if it has none.
  const std::string& text() const;

 private:
  static constexpr uintptr_t is_type = 1;  // neither lies at an odd address
  uintptr_t word_ = 0;
};

struct RegionInfo {
  int64_t id = -1;  ///< of its frame, unique in the process
  RegionName called{};
  int32_t depth = 0;  ///< 1: no region around it
  /// The number of the region around all others that it lies in, or its own. A recompute opens
  /// nested regions anew, with other numbers and the same outermost one.
  int64_t outermost = -1;

  /// Empty if it has none.
  const std::string& name() const { return called.text(); }
};

}  // namespace remat
