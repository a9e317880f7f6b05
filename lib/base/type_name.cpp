#include "lib/base/type_name.h"

#include <c10/util/Type.h>

#include <cstddef>
#include <mutex>
#include <string_view>
#include <typeindex>
#include <unordered_map>

namespace remat {

namespace {

constexpr std::string_view checkpointed_begin = "remat::Checkpointed<";

/// Returns the part after the last `::` outside of brackets: `Block` of
/// `main::{lambda()#1}::Block`.
std::string without_namespaces(const std::string& type) {
  std::size_t begin = 0;
  int depth = 0;
  for (std::size_t i = 0; i < type.size(); ++i) {
    if (type[i] == '<' || type[i] == '(' || type[i] == '{') ++depth;
    if (type[i] == '>' || type[i] == ')' || type[i] == '}') --depth;
    if (depth == 0 && type.compare(i, 2, "::") == 0) begin = i + 2;
  }
  return type.substr(begin);
}

}  // namespace

std::string written_type(const std::type_info& type) {
  std::string text = c10::demangle(type.name());
  const auto replace = [&text](std::string_view from, std::string_view to) {
    for (std::size_t at = 0; (at = text.find(from, at)) != text.npos; at += to.size())
      text.replace(at, from.size(), to);
  };
  replace("(anonymous namespace)::", "");
  replace("remat::CheckpointedImpl<", checkpointed_begin);
  replace(" >", ">");
  return text;
}

std::string plain_type(const std::string& written) {
  if (!written.starts_with(checkpointed_begin) || !written.ends_with('>')) return written;
  return written.substr(checkpointed_begin.size(), written.size() - checkpointed_begin.size() - 1);
}

const std::string& short_type(const std::type_info& type) {
  static std::mutex mutex;
  // Leaked: graphs may die in static destructors.
  static auto* const known = new std::unordered_map<std::type_index, std::string>;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [place, is_new] = known->try_emplace(type);
  if (is_new) {
    std::string name = without_namespaces(plain_type(written_type(type)));
    if (name.ends_with("Impl") && name.size() > 4) name.resize(name.size() - 4);
    place->second = std::move(name);
  }
  return place->second;
}

}  // namespace remat
