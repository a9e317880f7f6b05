#include "lib/selective/policy_table.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <utility>

#include "lib/base/once_per_name.h"
#include "lib/base/pattern.h"
#include "lib/seam/warn.h"
#include "lib/selective/op_traits.h"
#include "lib/selective/operator_names.h"
#include "lib/selective/policy_rule.h"
#include "lib/state/module_paths.h"

namespace remat {

namespace {

using Named = std::pair<std::string_view, CheckpointPolicy>;
constexpr std::array<Named, 9> answers_by_name{
    {{"save", CheckpointPolicy::PreferSave},
     {"offload", CheckpointPolicy::PreferCpuOffload},
     {"recompute", CheckpointPolicy::PreferRecompute},
     {"must_save", CheckpointPolicy::MustSave},
     {"prefer_save", CheckpointPolicy::PreferSave},
     {"must_recompute", CheckpointPolicy::MustRecompute},
     {"prefer_recompute", CheckpointPolicy::PreferRecompute},
     {"must_cpu_offload", CheckpointPolicy::MustCpuOffload},
     {"prefer_cpu_offload", CheckpointPolicy::PreferCpuOffload}}};

constexpr std::string_view everything = "*";
constexpr std::string_view names_key = "name=";

[[noreturn]] void refuse(std::string_view function, std::string_view line, std::string_view cause) {
  TORCH_CHECK_VALUE(
      false, "remat::", function, ": \"", line, "\" was no line of a policy table. Cause: ", cause,
      ". Hint: write PATHS: OPERATORS, PATHS, OPERATORS or *, as in "
      "\"layers.*.attention.**: aten::mm|aten::bmm\". Instead of operators, name=PATTERNS chooses "
      "values and calls of save_region with such a name.");
}

/// Returns the place of the colon between paths and operators; npos without one.
std::size_t colon_in(std::string_view pattern) {
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] != ':') continue;
    if (i + 1 == pattern.size() || pattern[i + 1] != ':') return i;
    ++i;
  }
  return pattern.npos;
}

std::string checked_patterns(std::string_view patterns, const std::string& line,
                             const char* function) {
  for (const std::string_view each : split(patterns, '|'))
    if (each.empty()) refuse(function, line, "a pattern is empty");
  return std::string(patterns);
}

}  // namespace

std::vector<PolicyLine> lines_in(std::string_view text) {
  constexpr const char* function = "Policy::parse";
  std::vector<PolicyLine> lines;
  for (const std::string_view row : split(text, '\n'))
    for (const std::string_view line : split(row.substr(0, row.find('#')), ';')) {
      if (line.empty()) continue;
      const auto equals = line.rfind('=');
      if (equals == line.npos) refuse(function, line, "it has no `= ANSWER`");
      const std::string_view answer = trimmed(line.substr(equals + 1));
      const auto* const found = std::ranges::find(answers_by_name, answer, &Named::first);
      if (found == answers_by_name.end())
        refuse(
            function, line,
            fmt::format("there is no answer \"{}\"; the answers are save, offload, recompute and "
                        "the enumerators of CheckpointPolicy, such as must_save",
                        answer));
      lines.push_back({std::string(trimmed(line.substr(0, equals))), found->second});
    }
  return lines;
}

PolicyTable::Line PolicyTable::parsed(const PolicyLine& given, const char* function) {
  Line line;
  line.text = trimmed(given.pattern);
  line.answer = given.answer;
  const std::string_view all = line.text;
  if (all.empty()) refuse(function, all, "its pattern is empty");
  const auto colon = colon_in(all);
  std::string_view paths = trimmed(all.substr(0, colon == all.npos ? 0 : colon));
  std::string_view rest = trimmed(all.substr(colon == all.npos ? 0 : colon + 1));
  if (colon == all.npos && rest.find("::") == rest.npos && !rest.starts_with(names_key))
    paths = std::exchange(rest, everything);
  else if (colon != all.npos && (paths.empty() || rest.empty()))
    refuse(function, all, "there is nothing on one side of the colon");
  if (!paths.empty() && paths != everything)
    line.paths = checked_patterns(paths, line.text, function);
  if (rest.starts_with(names_key)) {
    line.names = checked_patterns(trimmed(rest.substr(names_key.size())), line.text, function);
  } else if (rest != everything) {
    for (const std::string_view op : split(rest, '|')) {
      if (op.empty()) refuse(function, all, "an operator is empty");
      for (const uint32_t number : numbers_of_operators(std::string(op), function))
        line.ops.insert(number);
    }
  }
  return line;
}

PolicyTable::PolicyTable(const std::vector<PolicyLine>& lines, const char* function) {
  TORCH_CHECK_VALUE(!lines.empty(), "remat::", function,
                    ": the table had no lines. Hint: give at least {\"*\", PreferRecompute}.");
  for (const PolicyLine& each : lines) {
    Line line = parsed(each, function);
    if (std::ranges::any_of(lines_, [&](const Line& other) { return other.text == line.text; }))
      refuse(function, line.text, "the same pattern stands in an earlier line");
    if (!lines_.empty() && lines_.back().fits_everything())
      refuse(function, line.text,
             "a line before it matches everything, and the first line that matches answers");
    has_names_ = has_names_ || !line.names.empty();
    lines_.push_back(std::move(line));
  }
}

bool PolicyTable::Line::fits_name(const std::string& name) const {
  return ops.empty() && (names.empty() || fits_any(names, name, '.'));
}

bool PolicyTable::may_offload() const {
  return std::ranges::any_of(lines_, [](const Line& line) { return is_offloading(line.answer); });
}

std::optional<CheckpointPolicy> PolicyTable::answer_to_all(uint32_t name_number) const {
  for (const Line& line : lines_) {
    if (!line.fits_op(name_number)) continue;
    if (!line.paths.empty()) return std::nullopt;
    return line.answer;
  }
  return CheckpointPolicy::PreferRecompute;
}

CheckpointPolicy PolicyTable::answer(const PolicyContext& question) const {
  const bool is_name = !question.name.empty();
  const uint32_t number = is_name ? 0 : traits_of(question.op).name_number;
  for (const Line* line : lines_at(question.module_path()))
    if (is_name ? line->fits_name(question.name) : line->fits_op(number)) return line->answer;
  return CheckpointPolicy::PreferRecompute;
}

const std::vector<const PolicyTable::Line*>& PolicyTable::lines_at(const std::string& path) const {
  bool is_first = false;
  const std::vector<const Line*>* lines = nullptr;
  {
    const std::lock_guard<SpinLock> lock(mutex_);
    const auto found = by_path_.find(&path);
    if (found != by_path_.end()) return *found->second;
    std::vector<const Line*> fitting;
    for (const Line& line : lines_)
      if (line.paths.empty() || (!path.empty() && fits_any(line.paths, path, '.')))
        fitting.push_back(&line);
    is_first = by_path_.empty();
    lines =
        by_path_
            .emplace(&path, std::make_unique<const std::vector<const Line*>>(std::move(fitting)))
            .first->second.get();
  }
  if (is_first) warn_about_unknown();
  return *lines;
}

void PolicyTable::warn_about_unknown() const {
  std::vector<std::string> unknown;
  bool is_any_known = false;
  for (const Line& line : lines_) {
    if (line.paths.empty()) continue;
    bool is_known = false;
    visit_module_paths([&](const std::string& path) {
      is_any_known = true;
      is_known = is_known || (!path.empty() && fits_any(line.paths, path, '.'));
    });
    if (!is_known) unknown.push_back(line.text);
  }
  static OncePerName warned;
  std::erase_if(unknown, [&](const std::string& line) {
    return !warned.is_first(line + (is_any_known ? "" : "?"));
  });
  if (unknown.empty()) return;
  const std::string lines = fmt::format("\"{}\"", fmt::join(unknown, "\", \""));
  seam::warn(c10::str(
      "remat: a policy chooses by the paths of modules in ", lines,
      is_any_known
          ? ", and no known module has such a path. Hint: compare the spelling; a pattern's * "
            "matches no dot, and paths begin at the tree that was registered or, without one, at "
            "the module that is the region's function."
          : ", and no module is known here. Hint: register the model once "
            "(remat::register_tree), or let the region's function be a module."));
}

}  // namespace remat
