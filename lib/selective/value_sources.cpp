#include "lib/selective/value_sources.h"

#include <algorithm>

namespace remat {

namespace {
/// Number of the latest entries that are searched one by one: a call mostly reads recent results.
constexpr std::size_t max_scanned = 32;

/// Returns the version of a tensor; 0 for inference tensors, which have none and cannot change
/// visibly to autograd.
uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}
}  // namespace

void ValueSources::add(const at::Tensor& result, ValueSource source, uint32_t num_changes) {
  if (storage_of(result) != nullptr)
    entries_.push_back({weak_storage_of(result), source, version_of(result) - num_changes, {}});
}

void ValueSources::set(const at::Tensor& value, ValueSource source, uint32_t num_changes) {
  if (storage_of(value) == nullptr) return;
  // Only the tensor, which counts as one, and `own` refer to a new storage.
  const WeakStorage own = weak_storage_of(value);
  Entry* const known = own.weak_use_count() > 2 ? find(storage_of(value)) : nullptr;
  if (known == nullptr) return add(value, source, num_changes);
  known->source = source;
  known->first_version = version_of(value) - num_changes;
}

std::optional<ValueSources::Made> ValueSources::find(const at::Tensor& tensor) {
  const Entry* const entry = find(storage_of(tensor));
  if (entry == nullptr) return std::nullopt;
  return Made{entry->source, version_of(tensor) - entry->first_version};
}

ValueSources::Notes* ValueSources::notes_of(const c10::StorageImpl* storage) {
  Entry* const entry = find(storage);
  return entry == nullptr ? nullptr : &entry->notes;
}

ValueSources::Entry* ValueSources::find(const c10::StorageImpl* storage) {
  if (storage == nullptr) return nullptr;
  const std::size_t size = entries_.size();
  const std::size_t first_scanned =
      std::max(num_indexed_, size > max_scanned ? size - max_scanned : 0);
  for (std::size_t i = size; i-- > first_scanned;)
    if (entries_[i].storage._unsafe_get_target() == storage) return &entries_[i];
  if (first_scanned > num_indexed_)
    for (; num_indexed_ < size; ++num_indexed_)
      index_[entries_[num_indexed_].storage._unsafe_get_target()] = num_indexed_;
  const auto found = index_.find(storage);
  return found == index_.end() ? nullptr : &entries_[found->second];
}

void ValueSources::clear() {
  entries_ = {};  // clear() would keep the memory
  index_ = {};
  num_indexed_ = 0;
}

}  // namespace remat
