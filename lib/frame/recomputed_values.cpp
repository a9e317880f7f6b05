#include "lib/frame/recomputed_values.h"

#include <algorithm>
#include <utility>

#include "lib/base/counters.h"
#include "lib/base/waiting.h"
#include "lib/tensor/capture.h"

namespace remat {

int64_t RecomputedValues::put(int64_t position, Value&& value) {
  const auto index = static_cast<std::size_t>(position);
  value.bytes = static_cast<int64_t>(value.tensor.has_storage() ? value.tensor.nbytes() : 0);
  if (recorded != nullptr && value.bytes > 0) recorded->add(value.tensor.device(), value.bytes);
  if (values.size() == index) {  // usually in order
    values.push_back(std::move(value));
    return values.back().bytes;
  }
  if (values.size() < index) values.resize(index + 1);
  drop(position);
  return (values[index] = std::move(value)).bytes;
}

bool RecomputedValues::has(int64_t position) const {
  const auto index = static_cast<std::size_t>(position);
  return index < values.size() && values[index].tensor.defined();
}

Value RecomputedValues::take(int64_t position) {
  const auto index = static_cast<std::size_t>(position);
  Value value = std::move(values[index]);  // leaves its tensors undefined
  values[index].bytes = 0;
  if (recorded != nullptr && value.bytes > 0) recorded->add(value.tensor.device(), -value.bytes);
  count(live_counters.recomputed_bytes_alive, -value.bytes);
  return value;
}

int64_t RecomputedValues::num_bytes() const {
  int64_t bytes = 0;
  for (const Value& value : values) bytes += value.bytes;
  return bytes;
}

bool RecomputedValues::has_values() const {
  return std::any_of(values.begin(), values.end(),
                     [](const Value& each) { return each.tensor.defined(); });
}

void RecomputedValues::wait_for_unread(int64_t position) const {
  const Value& value = peek(position);
  if (beside == nullptr || value.ready == nullptr) return;
  for (const c10::Stream& stream : beside->of_forward.streams)
    if (stream.device() == value.ready->stream().device()) value.ready->block(stream);
}

bool RecomputedValues::owns_sparse_alone(int64_t position) {
  const at::Tensor parts = sparse_values_of(peek(position).tensor);  // shared by all its aliases
  if (!parts.defined()) return false;
  std::size_t num_owners = 1;
  for (Value& each : values)
    for (at::Tensor* tensor : {&each.tensor, &each.alias}) {
      if (!tensor->defined() || !sparse_values_of(*tensor).is_same(parts)) continue;
      *tensor = tensor->tensor_data();
      ++num_owners;
    }
  return parts.use_count() == num_owners && parts.storage().use_count() == 1;
}

// A view holds more references to its base than can be counted: the functions that would make the
// view again, or its base from it, own tensors too. So views are replaced by aliases first.
bool RecomputedValues::owns_alone(int64_t position) {
  if (!has(position)) return false;
  if (!peek(position).tensor.has_storage()) return owns_sparse_alone(position);
  const at::Storage storage = peek(position).tensor.storage();
  std::size_t num_owners = 1;  // `storage` here
  for (Value& each : values)
    for (at::Tensor* tensor : {&each.tensor, &each.alias}) {
      if (!tensor->defined() || !tensor->has_storage() || !tensor->storage().is_alias_of(storage))
        continue;
      *tensor = tensor->tensor_data();
      ++num_owners;
    }
  return storage.use_count() == num_owners;
}

void RecomputedValues::drop(int64_t position) noexcept {
  const auto index = static_cast<std::size_t>(position);
  if (index >= values.size() || !values[index].tensor.defined()) return;
  const Value& value = values[index];
  wait_for_unread(position);
  if (recorded != nullptr && value.bytes > 0) recorded->add(value.tensor.device(), -value.bytes);
  count(live_counters.recomputed_bytes_alive, -value.bytes);
  values[index] = Value();
}

void RecomputedValues::clear() noexcept {
  for (std::size_t i = 0; i < values.size(); ++i) drop(static_cast<int64_t>(i));
  values.clear();
}

void RecomputedValues::tell_change() noexcept {
  num_changes_.fetch_add(1, std::memory_order_release);
  num_changes_.notify_all();
}

void RecomputedValues::wait_for_change(std::unique_lock<SpinLock>& lock) {
  const uint32_t before = num_changes_.load(std::memory_order_acquire);
  lock.unlock();
  {
    const WaitForThread waiting;
    num_changes_.wait(before, std::memory_order_acquire);
  }
  lock.lock();
}

}  // namespace remat
