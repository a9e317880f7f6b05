#include "lib/apply/module_tree.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>

#include "lib/base/pattern.h"

namespace remat {

namespace {

constexpr std::string_view conditions_text =
    "Hint: write conditions as key=value, separated by commas. The keys are name (a pattern of "
    "paths: `*` matches anything except a dot, `**` matches anything, `|` separates "
    "alternatives), type (a pattern of class names, in the same syntax), every (a number of at "
    "least 1) and policy (text for Policy::parse); for example "
    "\"every=2,name=layers.*,type=Bottleneck\".";

void add_tree(std::vector<TreeModule>& all, const std::string& path, const std::string& name,
              torch::nn::Module& module, torch::nn::Module* parent) {
  all.push_back({path, name, &module, parent});
  for (const auto& child : module.named_children())
    add_tree(all, path.empty() ? child.key() : path + "." + child.key(), child.key(),
             *child.value(), &module);
}

/// Returns all names of a class: with all, some or no namespaces, and with `Impl` and without.
std::vector<std::string_view> names_of_type(const std::string& written, const std::string& plain) {
  std::vector<std::string_view> names;
  for (const std::string* const type : {&written, &plain}) {
    const std::string_view whole = *type;
    int depth = 0;
    for (std::size_t i = 0; i < whole.size(); ++i) {
      depth += whole[i] == '<' ? 1 : whole[i] == '>' ? -1 : 0;
      if (i != 0 && !(depth == 0 && i > 1 && whole.substr(i - 2, 2) == "::")) continue;
      const std::string_view name = whole.substr(i);
      names.push_back(name);
      if (name.ends_with("Impl")) names.push_back(name.substr(0, name.size() - 4));
    }
  }
  return names;
}

bool is_of_type(const torch::nn::Module& module, const std::string& patterns) {
  const std::string written = written_type(module), plain = plain_type(written);
  const auto names = names_of_type(written, plain);
  return std::ranges::any_of(split(patterns, '|'), [&](std::string_view pattern) {
    return std::ranges::any_of(names,
                               [&](std::string_view name) { return fits(pattern, name, 0); });
  });
}

bool has_path(const std::string& path, const std::string& patterns) {
  return !path.empty() && fits_any(patterns, path, '.');
}

std::string text_of(const ModuleChoice& choice) {
  std::vector<std::string> parts;
  if (!choice.name.empty()) parts.push_back("name=" + choice.name);
  if (!choice.type.empty()) parts.push_back("type=" + choice.type);
  if (choice.where) parts.emplace_back("a function or C++ type");
  if (choice.every != 1) parts.push_back("every=" + std::to_string(choice.every));
  return fmt::format("{}", fmt::join(parts, ","));
}

void check(const ModuleChoice& choice, std::string_view verb) {
  TORCH_CHECK_VALUE(choice.every >= 1, verb, ": ModuleChoice::every was ", choice.every,
                    ". Hint: set 1 for each match, 2 for every second match, and so on.");
  for (const std::string* const patterns : {&choice.name, &choice.type})
    if (!patterns->empty())
      for (const std::string_view pattern : split(*patterns, '|'))
        TORCH_CHECK_VALUE(!pattern.empty(), verb, ": a pattern in \"", *patterns,
                          "\" was empty. Hint: write a pattern before and after each `|`.");
}

[[noreturn]] void throw_nothing_chosen(const std::vector<TreeModule>& tree,
                                       const ModuleChoice& choice, std::string_view verb) {
  constexpr std::size_t most = 12;
  std::vector<std::string> there;
  for (const TreeModule& each : tree)
    if (there.size() < most)
      there.push_back(fmt::format("{} ({})", each.path.empty() ? "the root" : each.path,
                                  written_type(*each.module)));
  if (tree.size() > most) there.push_back(fmt::format("and {} more", tree.size() - most));
  TORCH_CHECK_VALUE(
      false, verb, ": no module of the tree matches \"", text_of(choice),
      "\". Cause: the tree has ", fmt::format("{}", fmt::join(there, ", ")),
      ". Hint: choose some of these. In paths, `*` matches anything except a dot: `layers.*` are "
      "the children of layers, `layers.**` all modules below it.");
}

[[noreturn]] void refuse_text(std::string_view text, std::string_view part,
                              const std::string& cause) {
  TORCH_CHECK_VALUE(false, "remat::ModuleChoice::parse: \"", part, "\" in \"", text,
                    "\" was not a condition. Cause: ", cause, ". ", conditions_text);
}

}  // namespace

std::vector<TreeModule> tree_of(torch::nn::Module& root) {
  std::vector<TreeModule> all;
  add_tree(all, "", "", root, nullptr);
  return all;
}

bool has_condition(const ModuleChoice& choice) {
  return !choice.name.empty() || !choice.type.empty() || choice.where != nullptr;
}

std::vector<TreeModule> chosen_of(torch::nn::Module& root, const ModuleChoice& choice,
                                  std::string_view verb) {
  check(choice, verb);
  const std::vector<TreeModule> tree = tree_of(root);
  std::vector<TreeModule> chosen;
  int64_t fitting = 0;
  for (const TreeModule& each : tree)
    if ((choice.name.empty() || has_path(each.path, choice.name)) &&
        (choice.type.empty() || is_of_type(*each.module, choice.type)) &&
        (!choice.where || choice.where(each.path, *each.module)) && fitting++ % choice.every == 0)
      chosen.push_back(each);
  if (chosen.empty()) throw_nothing_chosen(tree, choice, verb);
  return chosen;
}

std::string written_type(const torch::nn::Module& module) { return written_type(typeid(module)); }

ModuleChoice ModuleChoice::parse(std::string_view text) {
  TORCH_CHECK_VALUE(!trimmed(text).empty(), "remat::ModuleChoice::parse: the text was empty. ",
                    conditions_text);
  ModuleChoice choice;
  std::vector<std::string_view> seen;
  for (const std::string_view part : split(text, ',')) {
    const auto equals = part.find('=');
    if (equals == part.npos) refuse_text(text, part, "it has no `=`");
    const std::string_view key = trimmed(part.substr(0, equals));
    const std::string_view value = trimmed(part.substr(equals + 1));
    if (std::ranges::find(seen, key) != seen.end())
      refuse_text(text, part, fmt::format("the key {} appears twice", key));
    seen.push_back(key);
    if (key != "name" && key != "type" && key != "every" && key != "policy")
      refuse_text(text, part, fmt::format("there is no key \"{}\"", key));
    if (value.empty()) refuse_text(text, part, "its value is empty");
    if (key == "every") {
      const char* const end = value.data() + value.size();
      const auto [stopped, error] = std::from_chars(value.data(), end, choice.every);
      if (error != std::errc() || stopped != end || choice.every < 1)
        refuse_text(text, part, fmt::format("\"{}\" is not a number of at least 1", value));
      continue;
    }
    if (key == "policy") {
      choice.policy = Policy::parse(value);
      continue;
    }
    for (const std::string_view pattern : split(value, '|'))
      if (pattern.empty()) refuse_text(text, part, "a pattern beside `|` is empty");
    (key == "name" ? choice.name : choice.type) = std::string(value);
  }
  return choice;
}

}  // namespace remat
