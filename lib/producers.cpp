#include "lib/producers.h"

namespace remat {

namespace {
/// So many are looked through one by one; what a call reads was mostly made shortly before.
constexpr std::size_t max_scanned = 32;
}  // namespace

void Producers::add(const at::Tensor& result, Producer producer) {
  if (storage_of(result) != nullptr) entries_.push_back({weak_storage_of(result), producer});
}

const Producer* Producers::find(const at::Tensor& tensor) {
  const c10::StorageImpl* const storage = storage_of(tensor);
  if (storage == nullptr) return nullptr;
  if (entries_.size() - num_indexed_ > max_scanned)
    for (; num_indexed_ < entries_.size(); ++num_indexed_)
      index_[entries_[num_indexed_].storage._unsafe_get_target()] = num_indexed_;
  for (std::size_t i = entries_.size(); i-- > num_indexed_;)
    if (entries_[i].storage._unsafe_get_target() == storage) return &entries_[i].producer;
  const auto found = index_.find(storage);
  return found == index_.end() ? nullptr : &entries_[found->second].producer;
}

void Producers::clear() {
  entries_.clear();
  index_.clear();
  num_indexed_ = 0;
}

}  // namespace remat
