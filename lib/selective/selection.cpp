#include "lib/selective/selection.h"

#include <utility>

#include "lib/frame/layers.h"
#include "lib/seam/engine.h"
#include "lib/selective/replay.h"

namespace remat {

Selection::Selection(Frame& frame, std::shared_ptr<const PolicyRule> rule)
    : frame_(frame), rule_(std::move(rule)), task_at_start_(seam::graph_task_id()) {
  if (rule_ == nullptr) return;
  moves_.emplace(frame.region().info.id, rule_->options());
}

detail::HooksAround Selection::hooks() const {
  return rule_ != nullptr && rule_->options().save_through_hooks ? detail::HooksAround::All
                                                                 : detail::HooksAround::Regions;
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

uint32_t Selection::number(const c10::OperatorHandle& op) {
  const auto [place, is_new] =
      record_.numbers.emplace(op, static_cast<uint32_t>(record_.operators.size()));
  if (is_new)
    record_.operators.push_back(
        {op,
         &traits_of(op),
         rule_ == nullptr ? CheckpointPolicy::PreferRecompute : rule_->answer_to_all(op),
         {}});
  return place->second;
}

CallRecordPtr Selection::make_record() {
  // Under a policy that uses names most records are deleted at the end of the forward.
  if (looks_at_names()) return CallRecordPtr(new CallRecord(/*lives_in_slab=*/false));
  return CallRecordPtr(new (record_.slab.room()) CallRecord(/*lives_in_slab=*/true));
}

int64_t Selection::input_of(const c10::StorageImpl* storage) const {
  return storage == nullptr ? -1 : frame_.inputs().storages().number_of(storage);
}

void Selection::describe(c10::ArrayRef<c10::IValue> arguments, CallRecord& record) {
  for (const c10::IValue& argument : arguments) {
    bool holds_tensors = false;
    visit_tensors_in(argument, [&](const at::Tensor& tensor) {
      holds_tensors = true;
      describe(tensor, record.tensors.emplace_back());
    });
    if (!holds_tensors && !argument.isGenerator()) record.others.push_back(argument);
  }
}

void Selection::describe(const at::Tensor& tensor, ArgumentRecord& record) {
  if (!tensor.defined()) return;
  record.metadata = TensorMetadata(tensor, /*with_strides=*/false);
  record.storage = weak_memory_of(tensor);
  if (const at::Tensor* const leaf = leaf_behind(tensor); leaf != nullptr && leaf->has_storage())
    record.leaf = weak_storage_of(*leaf);
  record.input = input_of(memory_of(tensor));
  record.leaf_input = input_of(record.leaf._unsafe_get_target());
  if (const auto made = sources_.find(tensor)) {
    record.source = made->source;
    record.num_changes = made->num_changes;
  }
}

Selection::ResultIndex* Selection::kept_result(const c10::StorageImpl* storage) {
  const ValueSources::Notes* const notes =
      record_.num_kept == 0 ? nullptr : sources_.notes_of(storage);
  return notes == nullptr || notes->kept == ValueSources::Notes::not_kept
             ? nullptr
             : &kept_results_[notes->kept];
}

// Under policies that use names any result may be kept later.
void Selection::note_read(const c10::StorageImpl* storage) {
  if (record_.num_kept == 0 && !looks_at_names()) return;
  if (ValueSources::Notes* const notes = sources_.notes_of(storage)) notes->is_read = true;
}

void Selection::note_read(c10::ArrayRef<c10::IValue> arguments) {
  if (record_.num_kept == 0 && !looks_at_names()) return;
  visit_tensors_in(arguments, [this](const at::Tensor& tensor) { note_read(storage_of(tensor)); });
}

void Selection::tensor_was_read(const at::Tensor& tensor) {
  if (record_.is_settled) return;
  std::lock_guard<SpinLock> lock(record_.mutex);
  note_read(storage_of(tensor));
}

void Selection::slot_added(const at::Tensor& saved, int64_t position) {
  if (record_.is_settled) return;
  std::lock_guard<SpinLock> lock(record_.mutex);
  note_read(storage_of(saved));
  if (rule_ == nullptr) return;
  num_inside_.fetch_add(1, std::memory_order_relaxed);
  calls_at_last_save_ = record_.sequence.size();
  const auto index = static_cast<std::size_t>(position);
  if (slot_sources_.size() <= index) slot_sources_.resize(index + 1);
  slot_sources_[index] = sources_.find(saved);
}

void Selection::value_was_handed_over(const at::Tensor& value, int64_t region, int64_t position) {
  if (record_.is_settled || rule_ == nullptr) return;
  std::lock_guard<SpinLock> lock(record_.mutex);
  const auto index = static_cast<std::size_t>(position);
  if (region != frame_.region().info.id)
    sources_.set(value, {.is_known = false});
  else if (index < slot_sources_.size() && slot_sources_[index])
    sources_.set(value, slot_sources_[index]->source, slot_sources_[index]->num_changes);
}

void Selection::note_results(const OpRecord& op, uint32_t number, uint32_t call,
                             c10::ArrayRef<c10::IValue> results, const StoragesOf& given) {
  if (op.traits->is_view) return;
  uint32_t output = 0;
  for (std::size_t i = 0; i < results.size(); ++i)
    visit_tensors_in(results[i], [&](const at::Tensor& tensor) {
      const ValueSource source{number, call, output++, op.traits->is_factory};
      if (is_made_by(op.op, i) && !given.contain(tensor)) sources_.set(tensor, source);
    });
}

int64_t Selection::before_inner(const c10::OperatorHandle& op,
                                c10::ArrayRef<c10::IValue> arguments) {
  Freed freed;
  std::lock_guard<SpinLock> lock(record_.mutex);
  if (record_.is_settled) return -1;
  OpRecord& record = record_.operators[number(op)];
  record_.sequence.push_back(number(op));
  record.calls.emplace_back();
  note_read(arguments);
  if (record.traits->is_mutable) note_written(op, arguments, freed);
  return static_cast<int64_t>(record.calls.size()) - 1;
}

void Selection::after_inner(const c10::OperatorHandle& op, int64_t call,
                            c10::ArrayRef<c10::IValue> results, const StoragesOf& given) {
  std::lock_guard<SpinLock> lock(record_.mutex);
  if (call < 0 || record_.is_settled) return;
  const uint32_t n = number(op);
  note_results(record_.operators[n], n, static_cast<uint32_t>(call), results, given);
}

PinRecord::Value Selection::keep_value(const at::Tensor& value, int64_t number, std::size_t output,
                                       const detail::RegionScope& region, const KeptPlace& place) {
  PinRecord::Value kept{KeptTensor(value, region, hooks(), place), grad_role_of(value)};
  if (place.where != KeptWhere::InPlace) moves_->move_excess();
  if (rule_ == nullptr || !value.defined()) return kept;
  // The recompute gets another tensor, which must have the same origin.
  std::lock_guard<SpinLock> lock(record_.mutex);
  if (!sources_.find(value))
    sources_.add(value, {.call = static_cast<uint32_t>(number),
                         .output = static_cast<uint32_t>(output),
                         .is_factory = true,
                         .is_pin = true});
  kept.made = sources_.find(value);
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
  std::lock_guard<SpinLock> lock(record_.mutex);
  record_.pins[static_cast<std::size_t>(number)] = std::move(pin);
}

void Selection::keep_itself(const at::Tensor& value, int64_t number,
                            const detail::RegionScope& region, const KeptPlace& place,
                            bool is_name) {
  auto itself = std::make_shared<PinRecord>();
  itself->type = &typeid(at::Tensor);
  itself->is_name = is_name;
  itself->values.push_back(keep_value(value, number, 0, region, place));
  keep_pin(number, std::move(itself));
}

bool Selection::holds(const c10::StorageImpl* storage) {
  std::lock_guard<SpinLock> lock(record_.mutex);
  bool holds = kept_result(storage) != nullptr;
  record_.visit_pinned([&](const KeptTensor& each) { holds |= each.storage() == storage; });
  return holds;
}

bool Selection::may_replace(const c10::StorageImpl* storage) {
  // Of a pin only a value elsewhere counts: a value in place may belong to a captured tensor, which
  // is checked as such.
  bool may = kept_result(storage) != nullptr;
  record_.visit_pinned(
      [&](const KeptTensor& each) { may |= each.storage() == storage && each.is_elsewhere(); });
  return may;
}

std::unique_ptr<KeptReplay> Selection::begin_recompute(Filler& filler,
                                                       const std::vector<at::Tensor>& inputs) {
  // Before the end of forward more names may follow.
  if (rule_ != nullptr && record_.is_settled) rule_->warn_about_unseen();
  return std::make_unique<Replay>(frame_, *this, filler, inputs);
}

}  // namespace remat
