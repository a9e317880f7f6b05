// Keeps the call that made a value, when the value gets a name later.

#include <utility>

#include "lib/selective/selection.h"

namespace remat {

/// Returns whether a copy would free no memory, because the value itself stays alive.
bool Selection::is_alive_anyway(const at::Tensor& value) const {
  const c10::StorageImpl* const storage = storage_of(value);
  return storage != nullptr && (is_parameter(value) || frame_.inputs().is_in_place(*storage));
}

// Keeps the call that made `value`. Returns false if that is impossible.
bool Selection::keep_named(const at::Tensor& value, CheckpointPolicy answer,
                           const detail::RegionScope& region) {
  std::vector<c10::IValue> results;
  std::unique_lock<SpinLock> lock(record_.mutex);
  const auto made = sources_.find(value);
  if (!made || made->source.is_pin || !made->source.is_known || made->num_changes > 0) return false;
  const ValueSource found = made->source;
  CallRecord* const record = record_.operators[found.op].calls[found.call].get();
  if (record == nullptr || found.output >= record->results.size()) return false;
  record->is_preferred = false;  // a name must be kept
  if (record->is_kept) return true;
  if (record_.operators[found.op].op.schema().returns().size() != record->results.size())
    return false;
  for (const ResultRecord& each : record->results) {
    if (each.dtype == c10::ScalarType::Undefined) {
      results.emplace_back(at::Tensor());
      continue;
    }
    c10::intrusive_ptr<c10::StorageImpl> storage = each.storage.lock();
    if (!storage) return false;
    if (each.held.defined()) {
      results.emplace_back(each.held);
      continue;
    }
    // The tensor object may be gone while a view of it lives; it can be rebuilt.
    at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(std::move(storage)), value.key_set(), c10::scalarTypeToTypeMeta(each.dtype));
    result.unsafeGetTensorImpl()->set_sizes_and_strides(each.sizes, each.strides, each.offset);
    result.unsafeGetTensorImpl()->set_version_counter(
        value.unsafeGetTensorImpl()->version_counter());
    results.emplace_back(std::move(result));
  }
  lock.unlock();
  keep(*record, results, answer, region, hooks());
  lock.lock();
  add_places(found.op, found.call, *record);
  return true;
}

void Selection::let_go(const at::Tensor& value) {
  Freed freed;
  std::lock_guard<SpinLock> lock(record_.mutex);
  const auto made = sources_.find(value);
  if (!made || made->source.is_pin || !made->source.is_known) return;
  if (record_.operators[made->source.op].calls[made->source.call] != nullptr)
    let_go(ResultIndex{made->source.op, made->source.call, 0, 0}, freed);
}

void Selection::name(const at::Tensor& value, const std::string& name,
                     const detail::RegionScope& region) {
  const int64_t number = begin_pin();
  rule_->see(name);
  static const c10::OperatorHandle op =
      c10::Dispatcher::singleton().findSchemaOrThrow("remat::checkpoint_name", "");
  const std::vector<c10::IValue> arguments{value, name};
  const CheckpointPolicy answer =
      rule_->answer({op, "remat::checkpoint_name", arguments, /*is_recompute=*/false, name});
  if (answer == CheckpointPolicy::MustRecompute) return let_go(value);
  if (!is_keeping(answer) || keep_named(value, answer, region)) return;
  // Its owner may write to it, which is not seen here.
  const KeptPlace place =
      is_alive_anyway(value) ? KeptPlace() : place_of(value, answer, /*is_beside=*/false);
  keep_itself(value, number, region, place, /*is_name=*/true);
}

void Selection::hold_for_name(const ResultIndex& call, CallRecord& record,
                              c10::ArrayRef<c10::IValue> results) {
  bool is_first = true;
  for (const c10::IValue& result : results)
    visit_tensors_in(result, [&](const at::Tensor& tensor) {
      ResultRecord& each = record.results.emplace_back();
      if (!tensor.defined()) return;
      each.dtype = tensor.scalar_type();
      // A tensor with its elements elsewhere (nested tensors, Python wrappers) cannot be rebuilt
      // from these parts: the value with the name is kept instead of its call.
      if (!KeptTensor::can_be_taken_apart(tensor)) return;
      each.storage = weak_storage_of(tensor);
      each.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
      each.strides.assign(tensor.strides().begin(), tensor.strides().end());
      each.offset = tensor.storage_offset();
      if (!std::exchange(is_first, false)) each.held = tensor.tensor_data();
    });
  if (record.results.size() > 1) holding_.push_back(call);
}

void Selection::look_through_held(Freed& freed) {
  constexpr std::size_t interval = 32;  // number of held calls from which they are checked
  if (holding_.size() < interval) return;
  std::erase_if(holding_, [&](const ResultIndex& place) {
    CallRecord& held = *record_.operators[place.op].calls[place.call];
    const bool is_over = held.results.front().storage.expired();
    if (is_over)
      for (ResultRecord& each : held.results) freed.held.push_back(std::exchange(each.held, {}));
    return is_over;
  });
}

void Selection::end_naming() {
  Freed freed;
  std::lock_guard<SpinLock> lock(record_.mutex);
  for (const ResultIndex& place : holding_)
    for (ResultRecord& each : record_.operators[place.op].calls[place.call]->results)
      freed.held.push_back(std::exchange(each.held, {}));
  holding_ = {};
}

}  // namespace remat
