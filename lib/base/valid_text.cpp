#include "lib/base/valid_text.h"

#include <nlohmann/json.hpp>

namespace remat {

std::string valid_text(std::string_view text) {
  using Json = nlohmann::json;
  const std::string quoted = Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
  return without_noncharacters(Json::parse(quoted).get<std::string>());
}

std::string without_noncharacters(std::string text) {
  for (const std::string_view character : {"\uFFFE", "\uFFFF"})
    for (auto at = text.find(character); at != text.npos; at = text.find(character, at))
      text.replace(at, character.size(), "\uFFFD");
  return text;
}

std::string xml_text(std::string_view text) {
  std::string out;
  for (const char c : valid_text(text)) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else
      out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out;
}

}  // namespace remat
