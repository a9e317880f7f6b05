#pragma once
// Makes texts from a program, such as names of regions, readable for other programs.

#include <string>
#include <string_view>

namespace remat {

/// Returns the text as UTF-8 that parsers of JSON, XML and HTML accept: U+FFFD replaces bytes that
/// are not UTF-8, and U+FFFE and U+FFFF.
std::string valid_text(std::string_view text);
/// Returns the UTF-8 text with U+FFFD for U+FFFE and U+FFFF.
std::string without_noncharacters(std::string text);
/// Returns `valid_text` with escapes for &, <, > and quotes, and a space for control characters.
std::string xml_text(std::string_view text);

}  // namespace remat
