#include "hooks/depot/piece.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/util/Exception.h>

#include <exception>

#include "hooks/depot/comparable_place.h"
#include "hooks/depot/nearer_contents.h"
#include "hooks/host/save_on_cpu.h"
#include "lib/base/waiting.h"
#include "lib/seam/on_stream.h"
#include "lib/seam/unseen.h"
#include "lib/seam/warn.h"

namespace remat {

namespace {

/// Records the present end of the current stream, for which later work on other streams waits.
void mark(std::optional<Ready>& ready, c10::Device device) {
  ready.reset();
  if (!device.is_cpu()) ready.emplace(current_stream(device)).record();
}

}  // namespace

Piece::Piece(std::shared_ptr<Place> place, AroundPlace around, std::shared_ptr<MoveTotals> totals,
             const at::Tensor& tensor, int64_t begin, int64_t end, c10::ScalarType kind)
    : place_(std::move(place)),
      around_(around),
      totals_(std::move(totals)),
      source_(tensor.unsafeGetTensorImpl()->unsafe_storage().getWeakStorageImpl()),
      begin_(begin),
      end_(end),
      device_(tensor.device()),
      kind_(kind) {}

Piece::~Piece() {
  if (order_ != nullptr) order_->remove(number_);
}

void Piece::set_order(std::shared_ptr<PrefetchOrder> order, uint64_t number) {
  order_ = std::move(order);
  number_ = number;
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

void Piece::use_place(c10::function_ref<void()> use) const {
  const Unseen unseen;
  const TimeSpent time(totals_.get());
  try {
    around_(use);
  } catch (const std::exception&) {
    throw;
  } catch (...) {  // the engine carries no other exception; on its threads it would end the process
    TORCH_CHECK(false,
                "remat: a place for saved tensors threw something that is not a std::exception. "
                "Hint: derive the exception type from std::exception.");
  }
}

bool Piece::begin_store(const at::Tensor& tensor) {
  use_place([&] { contents_ = place_->begin_store(flat_view(tensor)); });
  if (contents_ == nullptr) return false;
  is_stored_late_ = contents_->is_stored_late();
  mark(stored_, tensor.device());
  if (totals_ != nullptr) totals_->moved(num_bytes());
  return true;
}

void Piece::finish_store() {
  const auto lock = lock_in_turn(turn_);
  finish_store_once();
}

void Piece::finish_store_once() {
  if (!is_stored_late_ || is_store_finished_) return;
  use_place([&] { contents_->finish_store(); });
  is_store_finished_ = true;
}

void Piece::set_must_arrive(bool must) const {
  if (auto* const host = dynamic_cast<HostContents*>(contents_.get())) host->set_must_arrive(must);
}

void Piece::check_arrival() const {
  if (auto* const host = dynamic_cast<HostContents*>(contents_.get())) host->check_arrival();
}

bool Piece::is_source_alive() const {
  // The order matters: the copy releases the original before it reports that.
  const auto* const host = dynamic_cast<const HostContents*>(contents_.get());
  const std::size_t num_own = host != nullptr && host->holds_original() ? 1 : 0;
  return source_.use_count() > num_own;
}

bool Piece::has_bytes_of(const char* bytes) const {
  const TimeSpent time(totals_.get());
  return static_cast<ComparableContents&>(*contents_).has_bytes_of(bytes);
}

bool Piece::begin_load() noexcept {
  const std::unique_lock<std::mutex> lock(turn_, std::try_to_lock);
  if (!lock || is_load_begun_ || !loaded_.expired()) return false;
  try {
    if (stored_) stored_->block(current_stream(device_));
    use_place([&] { contents_->begin_load(); });
    is_load_begun_ = true;
  } catch (const std::exception&) {  // such as a lack of memory: the read reports the error
  }
  return is_load_begun_;
}

int64_t Piece::bytes_to_approach() const {
  const auto* const contents = dynamic_cast<const NearerContents*>(contents_.get());
  return contents == nullptr ? 0 : contents->bytes_to_approach();
}

bool Piece::begin_approach() noexcept {
  const std::unique_lock<std::mutex> lock(turn_, std::try_to_lock);
  if (!lock || is_load_begun_ || is_approaching_ || !loaded_.expired()) return false;
  try {
    use_place([&] { dynamic_cast<NearerContents&>(*contents_).begin_approach(); });
    is_approaching_ = true;
  } catch (const std::exception&) {  // such as a lack of host memory: the read loads it
  }
  return is_approaching_;
}

void Piece::cancel_load() noexcept {
  const auto lock = lock_in_turn(turn_);
  const bool was_approaching = std::exchange(is_approaching_, false);
  if (!std::exchange(is_load_begun_, false) && !was_approaching) return;
  try {
    use_place([&] { contents_->cancel_load(); });
  } catch (const std::exception& error) {
    seam::warn(c10::str("remat: a place for saved tensors could not cancel a load: ",
                        seam::text_of(error)));
  }
}

Piece::Loaded Piece::load() {
  Loaded loaded = load_or_share();
  if (order_ != nullptr) order_->prefetch_before(number_);
  return loaded;
}

Piece::Loaded Piece::load_or_share() {
  const auto lock = lock_in_turn(turn_);
  if (auto alive = loaded_.lock(); alive && loaded_counter_.current_version() == 0) {
    c10::Storage storage(std::move(alive));
    if (loaded_on_) loaded_on_->wait_before_use(storage);
    return {std::move(storage), loaded_counter_};
  }
  if (stored_) stored_->block(current_stream(device_));
  finish_store_once();
  const bool was_begun = std::exchange(is_load_begun_, false);  // also if the load fails
  is_approaching_ = false;
  c10::Storage storage;
  use_place([&] {
    at::Tensor loaded = contents_->finish_load();
    check_loaded(loaded);
    // If it has another owner it is copied: the next read must not see backward's writes.
    if (loaded.use_count() > 1 || loaded.storage().use_count() > 1 ||
        loaded.storage_offset() != 0 || !loaded.is_contiguous())
      loaded = at::empty(loaded.sizes(), loaded.options()).copy_(loaded);
    storage = loaded.storage();
  });
  mark(loaded_on_, device_);
  loaded_ = storage.getWeakStorageImpl();
  loaded_counter_ = c10::VariableVersion(/*version=*/0);
  if (totals_ != nullptr) totals_->loaded(num_bytes(), was_begun);
  return {std::move(storage), loaded_counter_, /*is_new=*/true, was_begun};
}

void Piece::check_loaded(const at::Tensor& loaded) const {
  const char* const place = "remat::SaveElsewhereGuard: ";
  const char* const advice =
      "\n"
      "Hint: return from finish_load a tensor like the one passed to begin_store: one dimension, "
      "the same number of elements, dtype and device. The stored contents are intact; the same "
      "backward can be tried again on a retained graph.";
  TORCH_CHECK_VALUE(loaded.defined(), place,
                    "a place returned an undefined tensor instead of the contents of a saved "
                    "tensor.",
                    advice);
  const auto type = c10::scalarTypeToTypeMeta(kind_);
  const int64_t size = num_bytes() / static_cast<int64_t>(type.itemsize());
  const bool is_flat = loaded.layout() == c10::kStrided && loaded.has_storage() &&
                       loaded.dim() == 1 && loaded.numel() == size && !loaded.is_conj() &&
                       !loaded.is_neg();
  TORCH_CHECK_VALUE(is_flat && loaded.dtype() == type && loaded.device() == device_, place,
                    "a place returned a tensor that does not match the one it stored.\n"
                    "stored: ",
                    size, " elements of ", type.name(), " on ", device_,
                    "\nloaded: ", loaded.sizes(), " of ", loaded.dtype().name(), " on ",
                    loaded.device(), ", ", loaded.layout(), advice);
}

}  // namespace remat
