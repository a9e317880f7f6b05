#pragma once
// Texts that come from a program, such as names of regions, as other programs can read them.

#include <string>
#include <string_view>

namespace remat {

/// Returns the text as UTF-8 that parsers of JSON, XML and HTML accept: U+FFFD takes the place of
/// bytes that are not UTF-8, and of U+FFFE and U+FFFF.
std::string valid_text(std::string_view text);

}  // namespace remat
