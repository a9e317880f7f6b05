#pragma once
// Makes texts from a program, such as names of regions, readable for other programs.

#include <string>
#include <string_view>

namespace remat {

/// Returns the text as UTF-8 that parsers of JSON, XML and HTML accept: U+FFFD replaces bytes that
/// are not UTF-8, and U+FFFE and U+FFFF.
std::string valid_text(std::string_view text);

}  // namespace remat
