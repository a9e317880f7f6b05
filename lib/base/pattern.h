#pragma once
// Patterns over dotted paths and names: `*`, `**`, `?`, and `|` between alternatives.

#include <string_view>
#include <vector>

namespace remat {

/// Returns the text without white space at its ends.
std::string_view trimmed(std::string_view text);
/// Returns the trimmed parts between separators that are outside of angle brackets.
std::vector<std::string_view> split(std::string_view text, char separator);
/// Returns whether a text matches a pattern. `*` does not match a separator, `**` does; without a
/// separator (0) they are the same.
bool fits(std::string_view pattern, std::string_view text, char separator);
/// Returns whether a text matches one of the patterns between `|`.
bool fits_any(std::string_view patterns, std::string_view text, char separator);

}  // namespace remat
