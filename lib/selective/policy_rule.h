#pragma once
// The rule behind a Policy: its answers, and the names of values that it has seen.

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "lib/selective/op_traits.h"
#include "remat/policy.h"

namespace remat {

inline bool is_keeping(CheckpointPolicy answer) {
  return answer != CheckpointPolicy::MustRecompute && answer != CheckpointPolicy::PreferRecompute;
}
inline bool is_offloading(CheckpointPolicy answer) {
  return answer == CheckpointPolicy::MustCpuOffload || answer == CheckpointPolicy::PreferCpuOffload;
}

/// Returns whether a change in place of the result makes it computed again instead of an error.
inline bool is_preferring(CheckpointPolicy answer) {
  return answer == CheckpointPolicy::PreferSave || answer == CheckpointPolicy::PreferCpuOffload;
}

class PolicyTable;  // lib/selective/policy_table.h

/// The rule of a policy. It is immutable except for the seen names; all copies of a Policy and the
/// regions under it share it.
class PolicyRule {
 public:
  using Answers = std::unordered_map<uint32_t, CheckpointPolicy>;  ///< by OpTraits::name_number
  using Names = std::map<std::string, CheckpointPolicy>;

  PolicyRule(PolicyFn fn, SelectiveOptions options);
  PolicyRule(Answers ops, CheckpointPolicy other_ops, Names names, CheckpointPolicy other_names,
             SelectiveOptions options, uint8_t kinds = 0);
  PolicyRule(std::unique_ptr<const PolicyTable> table, SelectiveOptions options);
  ~PolicyRule();
  static Policy policy(std::shared_ptr<const PolicyRule> rule) { return Policy(std::move(rule)); }
  static const std::shared_ptr<const PolicyRule>& of(const Policy& policy) { return policy.rule_; }
  static std::shared_ptr<const PolicyRule> either(std::shared_ptr<const PolicyRule> a,
                                                  std::shared_ptr<const PolicyRule> b);

  /// Returns the answer to every call of an operator; empty if a function must be asked.
  std::optional<CheckpointPolicy> answer_to_all(const c10::OperatorHandle& op) const;
  /// Returns the answer to a question. Calls user code, if there is a function.
  CheckpointPolicy answer(const PolicyContext& question) const;

  const SelectiveOptions& options() const { return options_; }
  /// Returns whether any of its answers may move a result.
  bool may_offload() const;
  /// Returns whether names can matter; the facts for that are then recorded for every call.
  bool looks_at_names() const { return looks_at_names_; }
  /// Returns whether it is asked after an operator has run.
  bool asks_after() const { return options_.ask_after; }
  void see(const std::string& name) const;
  /// Warns, once per rule, about listed names that no value has had so far.
  void warn_about_unseen() const;

 private:
  CheckpointPolicy listed(uint32_t name_number) const;

  const PolicyFn fn_;
  const std::unique_ptr<const PolicyTable> table_;
  const Answers ops_;
  const CheckpointPolicy other_ops_ = CheckpointPolicy::PreferRecompute;
  const Names names_;
  const CheckpointPolicy other_names_ = CheckpointPolicy::PreferRecompute;
  const SelectiveOptions options_;
  const bool looks_at_names_;
  const uint8_t kinds_ = 0;  ///< a mask of OpKind: MustSave for these
  /// The two rules of a union with a function; both also see names.
  std::shared_ptr<const PolicyRule> first_, second_;
  mutable std::mutex mutex_;  // guards the members below
  mutable std::map<std::string, bool> unseen_;
  mutable bool has_warned_ = false;
};

}  // namespace remat
