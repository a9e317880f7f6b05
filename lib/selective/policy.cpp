// Definitions of policy.h: the ready-made policies.

#include "remat/policy.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "lib/seam/warn.h"
#include "lib/selective/operator_names.h"
#include "lib/selective/policy_rule.h"
#include "lib/selective/policy_table.h"

namespace remat {

namespace {

using Answer = CheckpointPolicy;

/// Returns the strength of an answer's wish to save.
int strength(Answer answer) {
  switch (answer) {
    case Answer::MustSave:
      return 5;
    case Answer::MustCpuOffload:
      return 4;
    case Answer::PreferSave:
      return 3;
    case Answer::PreferCpuOffload:
      return 2;
    case Answer::PreferRecompute:
      return 1;
    case Answer::MustRecompute:
      return 0;
  }
  return 0;
}

Answer stronger(Answer a, Answer b) { return strength(a) >= strength(b) ? a : b; }

Policy by_ops(const std::vector<std::string>& names, Answer answer, SelectiveOptions options,
              const char* function) {
  PolicyRule::Answers answers;
  for (const std::string& name : names)
    for (const uint32_t number : numbers_of_operators(name, function)) answers[number] = answer;
  return PolicyRule::policy(
      std::make_shared<const PolicyRule>(std::move(answers), Answer::PreferRecompute,
                                         PolicyRule::Names(), Answer::PreferRecompute, options));
}

Policy by_names(const std::vector<std::string>& names, Answer answer, Answer others,
                const SelectiveOptions& options) {
  PolicyRule::Names answers;
  for (const std::string& name : names) answers[name] = answer;
  return PolicyRule::policy(std::make_shared<const PolicyRule>(
      PolicyRule::Answers(), others, std::move(answers), others, options));
}

const SelectiveOptions& checked(const SelectiveOptions& options) {
  const auto check = [](int64_t value, const char* name) {
    TORCH_CHECK_VALUE(value >= 0, "remat: SelectiveOptions::", name, " was ", value,
                      ". Hint: give 0 or more.");
  };
  check(options.min_offload_bytes, "min_offload_bytes");
  check(options.prefetch_depth, "prefetch_depth");
  check(options.max_bytes_in_flight, "max_bytes_in_flight");
  check(options.keep_last, "keep_last");
  TORCH_CHECK_VALUE(
      !options.ask_after || !options.ask_again,
      "remat: SelectiveOptions::ask_after and ask_again were both set. Cause: a recompute asks "
      "before it runs an operator, so it has no results to show. Hint: set one of the two; with |, "
      "in both policies.");
  return options;
}

}  // namespace

PolicyRule::PolicyRule(PolicyFn fn, SelectiveOptions options)
    : fn_(std::move(fn)), options_(checked(options)), looks_at_names_(true) {}

PolicyRule::PolicyRule(std::unique_ptr<const PolicyTable> table, SelectiveOptions options)
    : table_(std::move(table)), options_(checked(options)), looks_at_names_(table_->has_names()) {}

PolicyRule::~PolicyRule() = default;

PolicyRule::PolicyRule(Answers ops, Answer other_ops, Names names, Answer other_names,
                       SelectiveOptions options, uint8_t kinds)
    : ops_(std::move(ops)),
      other_ops_(other_ops),
      names_(std::move(names)),
      other_names_(other_names),
      options_(checked(options)),
      looks_at_names_(!names_.empty()),
      kinds_(kinds) {
  for (const auto& [name, answer] : names_) unseen_.emplace(name, true);
}

bool PolicyRule::may_offload() const {
  const auto offloads = [](const auto& answers) {
    return std::any_of(answers.begin(), answers.end(),
                       [](const auto& each) { return is_offloading(each.second); });
  };
  return fn_ || (table_ && table_->may_offload()) || is_offloading(other_ops_) ||
         is_offloading(other_names_) || offloads(ops_) || offloads(names_);
}

Answer PolicyRule::listed(uint32_t name_number) const {
  const auto found = ops_.find(name_number);
  return found == ops_.end() ? other_ops_ : found->second;
}

std::optional<Answer> PolicyRule::answer_to_all(const c10::OperatorHandle& op) const {
  if (fn_) return std::nullopt;
  const OpTraits& traits = traits_of(op);
  if (table_) return table_->answer_to_all(traits.name_number);
  const unsigned kinds = kinds_ & traits.kinds;
  if ((kinds & ~unsigned{OpKind::HostCopy}) != 0) return Answer::MustSave;
  if (kinds != 0) return std::nullopt;
  return listed(traits.name_number);
}

Answer PolicyRule::answer(const PolicyContext& question) const {
  if (fn_) return fn_(question);
  if (table_) return table_->answer(question);
  if (question.name.empty()) {
    if (const auto to_all = answer_to_all(question.op)) return *to_all;
    return copies_to_host(question.args) ? Answer::MustSave
                                         : listed(traits_of(question.op).name_number);
  }
  const auto found = names_.find(question.name);
  return found == names_.end() ? other_names_ : found->second;
}

void PolicyRule::see(const std::string& name) const {
  for (const auto& each : {first_, second_})
    if (each != nullptr) each->see(name);
  std::lock_guard<std::mutex> lock(mutex_);
  unseen_.erase(name);
}

void PolicyRule::warn_about_unseen() const {
  for (const auto& each : {first_, second_})
    if (each != nullptr) each->warn_about_unseen();
  std::vector<std::string> names;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(has_warned_, true)) return;
    for (const auto& [name, unused] : unseen_) names.push_back(name);
  }
  if (!names.empty())
    seam::warn(c10::str(
        "remat: a policy lists ", fmt::format("\"{}\"", fmt::join(names, "\", \"")),
        ", but no value was given that name by remat::checkpoint_name in a region with this "
        "policy. Hint: check the spelling."));
}

std::shared_ptr<const PolicyRule> PolicyRule::either(std::shared_ptr<const PolicyRule> a,
                                                     std::shared_ptr<const PolicyRule> b) {
  if (a == nullptr || b == nullptr) return a == nullptr ? b : a;
  SelectiveOptions options = (a->may_offload() ? a : b)->options_;
  for (const PolicyRule* each : {a.get(), b.get()}) {
    const SelectiveOptions& own = each->options_;
    options.allow_cache_entry_mutation |= own.allow_cache_entry_mutation;
    options.save_through_hooks |= own.save_through_hooks;
    options.ask_again |= own.ask_again;
    options.ask_after |= own.ask_after;
    if (!each->may_offload()) continue;
    options.min_offload_bytes = std::max(options.min_offload_bytes, own.min_offload_bytes);
    options.prefetch_depth = std::max(options.prefetch_depth, own.prefetch_depth);
    options.max_bytes_in_flight = std::min(options.max_bytes_in_flight, own.max_bytes_in_flight);
    options.keep_last = std::max(options.keep_last, own.keep_last);
  }
  if (a->fn_ || b->fn_ || a->table_ || b->table_) {
    auto both = std::make_shared<PolicyRule>(
        [a, b](const PolicyContext& question) {
          return stronger(a->answer(question), b->answer(question));
        },
        options);
    both->first_ = a;
    both->second_ = b;
    return both;
  }
  Answers ops;
  for (const PolicyRule* each : {a.get(), b.get()})
    for (const auto& [number, unused] : each->ops_)
      ops[number] = stronger(a->listed(number), b->listed(number));
  Names names;
  const auto answer_of = [](const PolicyRule& rule, const std::string& name) {
    const auto found = rule.names_.find(name);
    return found == rule.names_.end() ? rule.other_names_ : found->second;
  };
  for (const PolicyRule* each : {a.get(), b.get()})
    for (const auto& [name, unused] : each->names_) {
      const Answer first = answer_of(*a, name), second = answer_of(*b, name);
      const bool both_keep = is_keeping(first) && is_keeping(second);
      TORCH_CHECK_VALUE(!(both_keep && a->names_.contains(name) && b->names_.contains(name) &&
                          is_offloading(first) != is_offloading(second)),
                        "remat: the name \"", name,
                        "\" is saved by one policy and offloaded by the other. Hint: list it in "
                        "only one of them.");
      names[name] = stronger(first, second);
    }
  return std::make_shared<PolicyRule>(std::move(ops), stronger(a->other_ops_, b->other_ops_),
                                      std::move(names), stronger(a->other_names_, b->other_names_),
                                      options, static_cast<uint8_t>(a->kinds_ | b->kinds_));
}

Policy::Policy(PolicyFn fn, SelectiveOptions options)
    : rule_(fn ? std::make_shared<const PolicyRule>(std::move(fn), options) : nullptr) {}
Policy::Policy(std::shared_ptr<const PolicyRule> rule) : rule_(std::move(rule)) {}

Policy save_ops(std::vector<std::string> ops, SelectiveOptions options) {
  return by_ops(ops, Answer::MustSave, options, "save_ops");
}

Policy offload_ops(std::vector<std::string> ops, SelectiveOptions options) {
  return by_ops(ops, Answer::MustCpuOffload, options, "offload_ops");
}

Policy save_matmuls(SelectiveOptions options) {
  const auto policy_with = [](const SelectiveOptions& with) {
    std::vector<std::string> ops{"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm",
                                 "aten::convolution"};
    // Each device has its own attention operators, and releases differ.
    for (const char* name :
         {"aten::_scaled_dot_product_flash_attention_for_cpu",
          "aten::_scaled_dot_product_flash_attention",
          "aten::_scaled_dot_product_efficient_attention",
          "aten::_scaled_dot_product_cudnn_attention",
          "aten::_scaled_dot_product_fused_attention_overrideable",
          "aten::_flash_attention_forward", "aten::_efficient_attention_forward"})
      if (!operators_named(name).empty()) ops.emplace_back(name);
    return by_ops(ops, Answer::PreferSave, with, "save_matmuls");
  };
  // Regions may call this each time, so the operators are looked up once.
  if (options.allow_cache_entry_mutation || options.save_through_hooks || options.ask_again)
    return policy_with(options);
  static const Policy policy = policy_with({});
  return policy;
}

namespace {

Policy by_kinds(unsigned kinds, SelectiveOptions options) {
  return PolicyRule::policy(std::make_shared<const PolicyRule>(
      PolicyRule::Answers(), Answer::PreferRecompute, PolicyRule::Names(), Answer::PreferRecompute,
      options, static_cast<uint8_t>(kinds)));
}

/// The names of the operators with effects.
struct Effects {
  std::mutex mutex;
  std::set<std::string> names;
  static Effects& get() {
    static auto* const all = new Effects;  // leaked: policies may be made in static destructors
    return *all;
  }
};

}  // namespace

Policy save_collectives(SelectiveOptions options) { return by_kinds(OpKind::Collective, options); }
Policy save_random(SelectiveOptions options) { return by_kinds(OpKind::Random, options); }
Policy save_nondeterministic(SelectiveOptions options) {
  return by_kinds(OpKind::Nondeterministic, options);
}
Policy save_host_copies(SelectiveOptions options) { return by_kinds(OpKind::HostCopy, options); }

void register_effect(const std::string& op) {
  TORCH_CHECK_VALUE(!operators_named(op).empty(), "remat::register_effect: there is no operator \"",
                    op, "\".", similar_names(op), " Hint: load its library before.");
  Effects& effects = Effects::get();
  const std::lock_guard<std::mutex> lock(effects.mutex);
  effects.names.insert(op);
}

Policy save_effects(SelectiveOptions options) {
  Effects& effects = Effects::get();
  const std::lock_guard<std::mutex> lock(effects.mutex);
  return by_ops({effects.names.begin(), effects.names.end()}, Answer::MustSave, options,
                "save_effects");
}

Policy save_unrepeatable(SelectiveOptions options) {
  return by_kinds(OpKind::Collective | OpKind::Random | OpKind::Nondeterministic | OpKind::HostCopy,
                  options) |
         save_effects(options);
}

Policy save_names(std::vector<std::string> names, SelectiveOptions options) {
  return by_names(names, Answer::MustSave, Answer::PreferRecompute, options);
}

Policy save_all_but_names(std::vector<std::string> names, SelectiveOptions options) {
  return by_names(names, Answer::MustRecompute, Answer::PreferSave, options);
}

Policy offload_names(std::vector<std::string> names, SelectiveOptions options) {
  return by_names(names, Answer::MustCpuOffload, Answer::PreferRecompute, options);
}

Policy policy_table(const std::vector<PolicyLine>& lines, SelectiveOptions options) {
  return PolicyRule::policy(std::make_shared<const PolicyRule>(
      std::make_unique<const PolicyTable>(lines, "policy_table"), options));
}

Policy Policy::parse(std::string_view text, const SelectiveOptions& options) {
  return Policy(std::make_shared<const PolicyRule>(
      std::make_unique<const PolicyTable>(lines_in(text), "Policy::parse"), options));
}

Policy operator|(Policy a, Policy b) {
  return PolicyRule::policy(PolicyRule::either(PolicyRule::of(a), PolicyRule::of(b)));
}

}  // namespace remat
