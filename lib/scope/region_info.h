#pragma once
// Identifies a region: its number, nesting depth and name.

#include <cstdint>
#include <string>
#include <typeinfo>

namespace remat {

/// The name of a region: from its options, or from a type, whose text is made on request.
class RegionName {
 public:
  RegionName() = default;
  /// `given` must outlive this object.
  explicit RegionName(const std::string* given) : word_(reinterpret_cast<uintptr_t>(given)) {}
  /// A null `type` gives no name.
  explicit RegionName(const std::type_info* type)
      : word_(type == nullptr ? 0 : reinterpret_cast<uintptr_t>(type) | is_type) {}
  /// Returns the name; empty if it has none.
  const std::string& text() const;

 private:
  static constexpr uintptr_t is_type = 1;  // neither has an odd address
  uintptr_t word_ = 0;
};

struct RegionInfo {
  int64_t id = -1;  ///< of its frame; unique in the process
  RegionName called{};
  int32_t depth = 0;  ///< 1 for an outermost region
  /// The number of the outermost region around, or its own. A recompute opens nested regions anew,
  /// with other numbers and the same outermost one.
  int64_t outermost = -1;

  /// Returns the name; empty if it has none.
  const std::string& name() const { return called.text(); }
};

}  // namespace remat
