#include "lib/scope/region_info.h"

#include "lib/base/type_name.h"

namespace remat {

const std::string& RegionName::text() const {
  static const std::string none;
  if (word_ == 0) return none;
  if ((word_ & is_type) == 0) return *reinterpret_cast<const std::string*>(word_);
  return short_type(*reinterpret_cast<const std::type_info*>(word_ & ~is_type));
}

}  // namespace remat
