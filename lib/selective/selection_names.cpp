// Keeps the call that made a value, when the value gets a name later.

#include <utility>

#include "lib/selective/selection.h"

namespace remat {

// Keeps the call that made `value`. Returns false if that is impossible.
bool Selection::keep_named(const at::Tensor& value, CheckpointPolicy answer,
                           const detail::RegionScope& region) {
  std::vector<c10::IValue> results;
  std::unique_lock<SpinLock> lock(record_.mutex);
  const auto made = record_.sources.find(value);
  if (!made || made->source.is_pin || !made->source.is_known || made->num_changes > 0) return false;
  const KeptIndex found{made->source.op, made->source.call};
  CallRecord* const record = record_.at(found).get();
  if (record == nullptr || made->source.output >= record->results.size()) return false;
  record->is_preferred = false;  // a name must be kept
  if (record->is_kept) return true;
  if (!held_for_names_.find_results(found, value, results)) return false;
  lock.unlock();
  keep(*record, results, answer, region, hooks_);
  lock.lock();
  record_.add_kept(found, *record);
  return true;
}

namespace {

/// Returns an operator that stands for names in questions to policies (pin.cpp).
c10::OperatorHandle operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

}  // namespace

CheckpointPolicy answer_for_region(const PolicyRule* rule, const std::string& name,
                                   const std::vector<at::Tensor>& arguments) {
  if (name.empty() || rule == nullptr || !rule->looks_at_names()) return CheckpointPolicy::MustSave;
  rule->see(name);
  static const c10::OperatorHandle op = operator_of("remat::save_region");
  const std::vector<c10::IValue> given{arguments, name};
  return rule->answer({op, "remat::save_region", given, /*is_recompute=*/false, name});
}

KeptPlace Selection::place_of(const at::Tensor& value, CheckpointPolicy answer) {
  // A copy would free no memory if the value itself stays alive. Its owner may write to it, which
  // is not seen here.
  const c10::StorageImpl* const storage = value.defined() ? storage_of(value) : nullptr;
  const bool stays_alive =
      storage != nullptr && (is_parameter(value) || frame_.inputs().is_in_place(*storage));
  return stays_alive || !moves_ ? KeptPlace()
                                : moves_->place_of(value, answer, /*is_beside=*/false);
}

void Selection::name(const at::Tensor& value, const std::string& name,
                     const detail::RegionScope& region) {
  const int64_t number = begin_pin();
  rule_->see(name);
  static const c10::OperatorHandle op = operator_of("remat::checkpoint_name");
  const std::vector<c10::IValue> arguments{value, name};
  const CheckpointPolicy answer =
      rule_->answer({op, "remat::checkpoint_name", arguments, /*is_recompute=*/false, name});
  if (answer == CheckpointPolicy::MustRecompute) {
    Freed freed;
    std::lock_guard<SpinLock> lock(record_.mutex);
    const auto made = record_.sources.find(value);
    if (!made || made->source.is_pin || !made->source.is_known) return;
    const KeptIndex call{made->source.op, made->source.call};
    if (record_.at(call) != nullptr) record_.let_go(call, freed);
    return;
  }
  if (!is_keeping(answer) || keep_named(value, answer, region)) return;
  keep_itself(*this, value, number, region, place_of(value, answer), /*is_name=*/true);
}

void Selection::end_naming() {
  Freed freed;
  std::lock_guard<SpinLock> lock(record_.mutex);
  held_for_names_.release(freed);
}

}  // namespace remat
