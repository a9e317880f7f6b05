#pragma once
// A policy as a table: the first line that matches a call's path, operator and name answers.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "lib/base/spin_lock.h"
#include "remat/policy.h"

namespace remat {

/// Returns the lines of a table in text. Throws `c10::ValueError` for a line without an answer.
std::vector<PolicyLine> lines_in(std::string_view text);

/// Immutable except for the matches that it remembers. Threads: any.
class PolicyTable {
 public:
  /// Throws `c10::ValueError` for a line that is wrong. `function`: the caller, for errors.
  PolicyTable(const std::vector<PolicyLine>& lines, const char* function);

  /// Returns the answer to every call of an operator, by OpTraits::name_number; empty if it depends
  /// on the path.
  std::optional<CheckpointPolicy> answer_to_all(uint32_t name_number) const;
  CheckpointPolicy answer(const PolicyContext& question) const;
  bool has_names() const { return has_names_; }
  bool may_offload() const;

 private:
  struct Line {
    std::string text, paths, names;    ///< empty patterns match everything
    std::unordered_set<uint32_t> ops;  ///< empty: all, unless it has a pattern of names
    CheckpointPolicy answer = CheckpointPolicy::PreferRecompute;
    bool fits_op(uint32_t name_number) const {
      return names.empty() && (ops.empty() || ops.contains(name_number));
    }
    bool fits_name(const std::string& name) const;
    bool fits_everything() const { return paths.empty() && names.empty() && ops.empty(); }
  };
  static Line parsed(const PolicyLine& line, const char* function);
  /// Returns the lines that match a path, in order.
  const std::vector<const Line*>& lines_at(const std::string& path) const;
  /// Warns about lines whose paths match no known module.
  void warn_about_unknown() const;

  std::vector<Line> lines_;
  bool has_names_ = false;
  mutable SpinLock mutex_;  // guards the member below
  /// The key is the path, of which there is one object each.
  mutable std::unordered_map<const std::string*, std::unique_ptr<const std::vector<const Line*>>>
      by_path_;
};

}  // namespace remat
