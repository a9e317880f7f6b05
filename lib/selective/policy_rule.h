#pragma once
// What is behind a Policy: its answers, and the names that values were given.

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

/// Returns whether a result that is changed in place is computed again, rather than an error.
inline bool is_preferring(CheckpointPolicy answer) {
  return answer == CheckpointPolicy::PreferSave || answer == CheckpointPolicy::PreferCpuOffload;
}

/// A rule is immutable but for the names seen; all copies of a Policy and the regions under it
/// share it.
class PolicyRule {
 public:
  using Answers = std::unordered_map<uint32_t, CheckpointPolicy>;  ///< by OpTraits::name_number
  using Names = std::map<std::string, CheckpointPolicy>;

  PolicyRule(PolicyFn fn, SelectiveOptions options);
  PolicyRule(Answers ops, CheckpointPolicy other_ops, Names names, CheckpointPolicy other_names,
             SelectiveOptions options);
  static Policy policy(std::shared_ptr<const PolicyRule> rule) { return Policy(std::move(rule)); }
  static const std::shared_ptr<const PolicyRule>& of(const Policy& policy) { return policy.rule_; }
  static std::shared_ptr<const PolicyRule> either(std::shared_ptr<const PolicyRule> a,
                                                  std::shared_ptr<const PolicyRule> b);

  /// The answer to every call of an operator, if no function has to be asked for it.
  std::optional<CheckpointPolicy> answer_to_all(const c10::OperatorHandle& op) const {
    return answer_to_all(traits_of(op).name_number);
  }
  /// Calls user code, if there is a function.
  CheckpointPolicy answer(const PolicyContext& question) const;

  const SelectiveOptions& options() const { return options_; }
  /// Whether any answer of it may be to move a result.
  bool may_offload() const;
  /// Whether a name can make a difference: what is needed for that is noted of every call then.
  bool looks_at_names() const { return fn_ || !names_.empty(); }
  void see(const std::string& name) const;
  /// Warns, once in the rule's life, about listed names that no value has had so far.
  void warn_about_unseen() const;

 private:
  std::optional<CheckpointPolicy> answer_to_all(uint32_t name_number) const;

  const PolicyFn fn_;
  const Answers ops_;
  const CheckpointPolicy other_ops_ = CheckpointPolicy::PreferRecompute;
  const Names names_;
  const CheckpointPolicy other_names_ = CheckpointPolicy::PreferRecompute;
  const SelectiveOptions options_;
  /// A union with a function has two, what was made of another one that: names are seen by them,
  /// too.
  std::shared_ptr<const PolicyRule> first_, second_;
  mutable std::mutex mutex_;  // guards what follows
  mutable std::map<std::string, bool> unseen_;
  mutable bool has_warned_ = false;
};

}  // namespace remat
