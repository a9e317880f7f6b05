#include "lib/base/valid_text.h"

#include <algorithm>

namespace remat {

namespace {

/// The beginning of a character: its first byte, and the possible second bytes (Unicode 15, table
/// 3-7).
struct Beginning {
  unsigned char from, to;
  std::size_t length;
  unsigned char second_from, second_to;
};
constexpr Beginning beginnings[] = {
    {0x00, 0x7F, 1, 0, 0},       {0xC2, 0xDF, 2, 0x80, 0xBF}, {0xE0, 0xE0, 3, 0xA0, 0xBF},
    {0xE1, 0xEC, 3, 0x80, 0xBF}, {0xED, 0xED, 3, 0x80, 0x9F}, {0xEE, 0xEF, 3, 0x80, 0xBF},
    {0xF0, 0xF0, 4, 0x90, 0xBF}, {0xF1, 0xF3, 4, 0x80, 0xBF}, {0xF4, 0xF4, 4, 0x80, 0x8F}};

/// Returns the number of bytes of the character at the beginning of a text. For an incomplete
/// character, sets `is_whole` to false and returns the number of its bytes.
std::size_t character_at(std::string_view text, bool& is_whole) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  is_whole = false;
  const auto* const found = std::find_if(
      std::begin(beginnings), std::end(beginnings),
      [&](const Beginning& each) { return each.from <= byte(0) && byte(0) <= each.to; });
  if (found == std::end(beginnings)) return 1;
  for (std::size_t i = 1; i < found->length; ++i) {
    const unsigned char least = i == 1 ? found->second_from : 0x80;
    const unsigned char greatest = i == 1 ? found->second_to : 0xBF;
    if (i == text.size() || byte(i) < least || byte(i) > greatest) return i;
  }
  is_whole = true;
  return found->length;
}

}  // namespace

std::string valid_text(std::string_view text) {
  std::string valid;
  valid.reserve(text.size());
  while (!text.empty()) {
    bool is_whole = false;
    const std::size_t length = character_at(text, is_whole);
    const std::string_view character = text.substr(0, length);
    const bool is_character = is_whole && character != "\uFFFE" && character != "\uFFFF";
    valid += is_character ? character : "\uFFFD";
    text.remove_prefix(length);
  }
  return valid;
}

}  // namespace remat
