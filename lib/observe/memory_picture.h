#pragma once
// Live bytes over time as a picture, stacked by kind, with the regions below.

#include <string>
#include <vector>

#include "lib/observe/recording.h"

namespace remat {

/// An SVG element. Bars and columns have titles, which browsers show under the pointer.
std::string memory_picture(const std::vector<Event>& events);
/// With &, < and quotes escaped.
std::string xml_text(const std::string& text);

}  // namespace remat
