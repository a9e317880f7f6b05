#include "hooks/piece.h"

#include <c10/core/ScalarTypeToTypeMeta.h>

#include <cstring>

#include "hooks/byte_hash.h"
#include "hooks/depot.h"
#include "hooks/on_stream.h"
#include "hooks/unseen.h"

namespace remat {

namespace {

/// A counter is nothing but a pointer, which it does not show.
bool is_same(const c10::VariableVersion& a, const c10::VariableVersion& b) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  return std::memcmp(&a, &b, sizeof(void*)) == 0;
}

/// What comes next on any other stream waits for what is on the current one now.
void mark(std::optional<Ready>& ready, c10::Device device) {
  ready.reset();
  if (!device.is_cpu()) ready.emplace(current_stream(device)).record();
}

}  // namespace

Piece::Piece(std::weak_ptr<Depot> depot, const at::Tensor& tensor, int64_t begin, int64_t end,
             c10::ScalarType kind, bool is_trusted)
    : depot_(std::move(depot)),
      source_(tensor.unsafeGetTensorImpl()->unsafe_storage().getWeakStorageImpl()),
      begin_(begin),
      end_(end),
      kind_(kind),
      counter_(tensor.unsafeGetTensorImpl()->version_counter()),
      version_(static_cast<uint32_t>(tensor._version())),
      is_trusted_(is_trusted) {}

Piece::~Piece() {
  if (const auto depot = depot_.lock()) depot->forget(*this);
}

at::Tensor Piece::flat_view(const at::Tensor& tensor) const {
  const auto type = c10::scalarTypeToTypeMeta(kind_);
  const auto bytes_each = static_cast<int64_t>(type.itemsize());
  const auto keys = tensor.key_set() -
                    c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  at::Tensor flat =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()), keys, type);
  const int64_t size = (end_ - begin_) / bytes_each, stride = 1;
  flat.unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef(size),
                                                    c10::IntArrayRef(stride), begin_ / bytes_each);
  return flat;
}

uint64_t Piece::hash_of(const at::Tensor& tensor) const {
  return hash_of_bytes(static_cast<const char*>(tensor.storage().data()) + begin_,
                       static_cast<std::size_t>(end_ - begin_));
}

bool Piece::copy(const at::Tensor& tensor, Place& place) {
  const Unseen unseen;
  if (tensor.is_cpu()) hash_ = hash_of(tensor);
  waiting_ = place.put(flat_view(tensor));
  if (waiting_ != nullptr) mark(copied_, tensor.device());
  return waiting_ != nullptr;
}

bool Piece::has(const at::Tensor& tensor, int64_t begin, int64_t end, c10::ScalarType kind,
                bool is_trusted) const {
  if (kind != kind_ || begin < begin_ || end > end_) return false;
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  if (!counter.enabled() || !is_same(counter, counter_) || counter.current_version() != version_)
    return false;
  if (!tensor.is_cpu()) return is_trusted && is_trusted_;
  if (static_cast<int64_t>(tensor.storage().nbytes()) < end_) return false;
  return hash_of(tensor) == hash_;
}

std::pair<c10::Storage, c10::VariableVersion> Piece::fetch() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (auto alive = fetched_.lock(); alive && fetched_counter_.current_version() == 0) {
    c10::Storage storage(std::move(alive));
    if (fetched_on_) fetched_on_->wait_before_use(storage);
    return {std::move(storage), fetched_counter_};
  }
  const Unseen unseen;
  if (copied_) copied_->block(current_stream(copied_->stream().device()));
  c10::Storage storage = waiting_->fetch().storage();
  mark(fetched_on_, storage.device());
  fetched_ = storage.getWeakStorageImpl();
  fetched_counter_ = c10::VariableVersion(/*version=*/0);
  return {std::move(storage), fetched_counter_};
}

}  // namespace remat
