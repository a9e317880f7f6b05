#include "lib/selective/selection.h"

#include <algorithm>
#include <utility>

#include "lib/frame/layers.h"
#include "lib/selective/replay.h"

namespace remat {

Selection::Selection(Frame& frame, std::shared_ptr<const PolicyRule> rule)
    : frame_(frame),
      rule_(rule.get()),
      hooks_(rule != nullptr && rule->options().save_through_hooks ? detail::HooksAround::All
                                                                   : detail::HooksAround::Regions),
      record_(std::move(rule)),
      held_for_names_(record_) {
  if (rule_ != nullptr) moves_.emplace(frame, rule_->options());
}

Selection& Selection::make(Frame& frame, std::shared_ptr<const PolicyRule> rule) {
  static SpinLock making;  // threads of one region may pin at once
  const std::lock_guard<SpinLock> lock(making);
  if (frame.keeper() == nullptr)
    frame.set_keeper(std::make_unique<Selection>(frame, std::move(rule)));
  return *of(frame);
}

namespace {

void keep_by_policy(Frame& frame, const Policy& policy) {
  Selection::make(frame, PolicyRule::of(policy));
}

[[maybe_unused]] const bool keeps_by_policy = (layers.keep_by_policy = keep_by_policy, true);

}  // namespace

void Selection::tensor_was_read(const at::Tensor& tensor) {
  if (record_.is_settled) return;
  std::lock_guard<SpinLock> lock(record_.mutex);
  record_.note_read(storage_of(tensor));
}

void Selection::slot_added(const at::Tensor& saved, int64_t position) {
  if (record_.is_settled) return;
  std::lock_guard<SpinLock> lock(record_.mutex);
  record_.note_read(storage_of(saved));
  pins_at_last_save_ = record_.pins.size();
  if (rule_ == nullptr) return;
  num_inside_.fetch_add(1, std::memory_order_relaxed);
  calls_at_last_save_ = record_.sequence.size();
  const auto index = static_cast<std::size_t>(position);
  if (slot_sources_.size() <= index) slot_sources_.resize(index + 1);
  slot_sources_[index] = record_.sources.find(saved);
}

void Selection::value_was_handed_over(const at::Tensor& value, int64_t region, int64_t position) {
  if (record_.is_settled || rule_ == nullptr) return;
  std::lock_guard<SpinLock> lock(record_.mutex);
  const auto index = static_cast<std::size_t>(position);
  if (region != frame_.region().info.id)
    record_.sources.set(value, {.is_known = false});
  else if (index < slot_sources_.size() && slot_sources_[index])
    record_.sources.set(value, slot_sources_[index]->source, slot_sources_[index]->num_changes);
}

int64_t Selection::before_inner(const c10::OperatorHandle& op,
                                c10::ArrayRef<c10::IValue> arguments) {
  Freed freed;
  std::lock_guard<SpinLock> lock(record_.mutex);
  if (record_.is_settled) return -1;
  const KeptIndex call = record_.add_call(op);
  record_.note_read(arguments);
  if (record_.operators[call.op].traits->is_mutable) record_.note_written(op, arguments, freed);
  return call.call;
}

void Selection::after_inner(const c10::OperatorHandle& op, int64_t call,
                            c10::ArrayRef<c10::IValue> results, const StoragesOf& given) {
  std::lock_guard<SpinLock> lock(record_.mutex);
  if (call < 0 || record_.is_settled) return;
  record_.note_results({static_cast<uint32_t>(record_.number_of(op)), static_cast<uint32_t>(call)},
                       results, given);
}

PinRecord::Value Selection::keep_value(const at::Tensor& value, int64_t number, std::size_t output,
                                       const detail::RegionScope& region, const KeptPlace& place) {
  PinRecord::Value kept{KeptTensor(value, region, hooks_, place), grad_role_of(value)};
  if (place.where != KeptWhere::InPlace) moves_->move_excess();
  if (rule_ == nullptr || !value.defined()) return kept;
  // The recompute gets another tensor, which must have the same origin.
  std::lock_guard<SpinLock> lock(record_.mutex);
  if (!record_.sources.find(value))
    record_.sources.add(value, {.call = static_cast<uint32_t>(number),
                                .output = static_cast<uint32_t>(output),
                                .is_factory = true,
                                .is_pin = true});
  kept.made = record_.sources.find(value);
  return kept;
}

int64_t Selection::begin_pin() {
  frame_.slots().end_operator(frame_.region());
  num_inside_.fetch_add(1, std::memory_order_relaxed);
  std::lock_guard<SpinLock> lock(record_.mutex);
  record_.pins.emplace_back();
  return static_cast<int64_t>(record_.pins.size()) - 1;
}

void Selection::keep_pin(int64_t number, std::shared_ptr<PinRecord> pin) {
  const auto index = static_cast<std::size_t>(number);
  std::lock_guard<SpinLock> lock(record_.mutex);
  if (pin->is_region) pins_at_last_save_ = std::min(pins_at_last_save_, index);
  record_.pins[index] = std::move(pin);
}

void keep_itself(Selection& selection, const at::Tensor& value, int64_t number,
                 const detail::RegionScope& region, const KeptPlace& place, bool is_name) {
  auto itself = std::make_shared<PinRecord>();
  itself->type = &typeid(at::Tensor);
  itself->is_name = is_name;
  itself->values.push_back(selection.keep_value(value, number, 0, region, place));
  selection.keep_pin(number, std::move(itself));
}

bool Selection::holds(const c10::StorageImpl* storage) {
  std::lock_guard<SpinLock> lock(record_.mutex);
  bool holds = record_.kept_result(storage) != nullptr;
  record_.visit_pinned([&](const KeptTensor& each) { holds |= each.storage() == storage; });
  return holds;
}

bool Selection::may_replace(const c10::StorageImpl* storage) {
  // A pin counts only a value elsewhere: a value in place may belong to a captured tensor, which
  // is checked as such.
  bool may = record_.kept_result(storage) != nullptr;
  record_.visit_pinned(
      [&](const KeptTensor& each) { may |= each.storage() == storage && each.is_elsewhere(); });
  return may;
}

std::unique_ptr<KeptReplay> Selection::begin_recompute(Filler& filler,
                                                       const std::vector<at::Tensor>& inputs) {
  // Before the end of forward more names may follow.
  if (rule_ != nullptr && record_.is_settled) rule_->warn_about_unseen();
  auto replay = std::make_unique<Replay>(frame_, record_, filler, inputs);
  if (moves_) moves_->begin_loads();
  return replay;
}

}  // namespace remat
