#include "lib/base/pattern.h"

#include <algorithm>
#include <cstddef>

namespace remat {

bool fits(std::string_view pattern, std::string_view text, char separator) {
  if (pattern.empty()) return text.empty();
  if (pattern.front() == '*') {
    const bool passes_all = separator == 0 || pattern.starts_with("**");
    const std::string_view rest = pattern.substr(pattern.starts_with("**") ? 2 : 1);
    for (std::size_t i = 0;; ++i) {
      if (fits(rest, text.substr(i), separator)) return true;
      if (i == text.size() || (!passes_all && text[i] == separator)) return false;
    }
  }
  if (text.empty()) return false;
  const bool is_same =
      pattern.front() == '?' ? text.front() != separator : pattern.front() == text.front();
  return is_same && fits(pattern.substr(1), text.substr(1), separator);
}

std::string_view trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(" \t\n");
  return first == text.npos ? std::string_view()
                            : text.substr(first, text.find_last_not_of(" \t\n") - first + 1);
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  std::size_t begin = 0;
  int depth = 0;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    if (i == text.size() || (text[i] == separator && depth == 0)) {
      parts.push_back(trimmed(text.substr(begin, i - begin)));
      begin = i + 1;
    } else {
      depth += text[i] == '<' ? 1 : text[i] == '>' ? -1 : 0;
    }
  }
  return parts;
}

bool fits_any(std::string_view patterns, std::string_view text, char separator) {
  return std::ranges::any_of(split(patterns, '|'), [&](std::string_view pattern) {
    return fits(pattern, text, separator);
  });
}

}  // namespace remat
