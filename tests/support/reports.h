#pragma once
// Parts of a recorder's report.

#include <string>

#include "remat/report.h"
#include "tests/support/support.h"

namespace remat::testing {

/// The row of the regions of this name, of which there must be one.
inline RegionReport region(const Report& report, const std::string& name) {
  for (const RegionReport& each : report.regions)
    if (each.name == name) return each;
  FAIL("no region " << name);
  return {};
}
inline RegionReport region(const Recorder& recorder, const std::string& name) {
  return region(recorder.report(), name);
}

inline RegionReport only_region(const Report& report) {
  REQUIRE(report.regions.size() == 1);
  return report.regions.front();
}

inline DeviceReport first_device(const Report& report) {
  REQUIRE(!report.devices.empty());
  return report.devices.front();
}

}  // namespace remat::testing
