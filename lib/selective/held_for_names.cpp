#include "lib/selective/held_for_names.h"

#include <algorithm>
#include <utility>

namespace remat {

void HeldForNames::add(const KeptIndex& call, c10::ArrayRef<c10::IValue> results, Freed& freed) {
  CallRecord& record = *record_.at(call);
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
  if (record.results.size() > 1) calls_.push_back(call);
  constexpr std::size_t interval = 32;  // number of calls from which they are checked
  if (calls_.size() < interval) return;
  std::erase_if(calls_, [&](const KeptIndex& place) {
    CallRecord& held = *record_.at(place);
    const bool is_over = held.results.front().storage.expired();
    if (is_over)
      for (ResultRecord& each : held.results) freed.held.push_back(std::exchange(each.held, {}));
    return is_over;
  });
}

bool HeldForNames::find_results(const KeptIndex& call, const at::Tensor& value,
                                std::vector<c10::IValue>& results) const {
  const std::vector<ResultRecord>& records = record_.at(call)->results;
  if (record_.operators[call.op].op.schema().returns().size() != records.size()) return false;
  for (const ResultRecord& each : records) {
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
  return true;
}

void HeldForNames::release(Freed& freed) {
  for (const KeptIndex& call : calls_)
    for (ResultRecord& each : record_.at(call)->results)
      freed.held.push_back(std::exchange(each.held, {}));
  calls_ = {};
}

}  // namespace remat
