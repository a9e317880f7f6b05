#include "hooks/depot/depot.h"

#include <ATen/SequenceNumber.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <typeinfo>
#include <utility>

#include "hooks/depot/comparable_place.h"
#include "lib/base/byte_hash.h"
#include "lib/seam/autograd_meta.h"
#include "lib/seam/on_stream.h"
#include "lib/seam/unseen.h"
#include "lib/seam/warn.h"

namespace remat {

namespace {

/// Below this size the spread of a tensor does not matter.
constexpr int64_t small_bytes = 1 << 16;
/// Largest ratio of the bytes that move with a tensor to its own bytes.
constexpr int64_t max_spread = 4;

/// Returns whether a tensor consists of sizes, strides and an offset into a storage, so that it can
/// be rebuilt.
bool is_plain(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return typeid(impl) == typeid(c10::TensorImpl) && tensor.layout() == c10::kStrided &&
         tensor.has_storage() && !tensor.is_meta() && !tensor.is_quantized() &&
         !tensor.is_nested() && !impl.has_symbolic_sizes_strides() &&
         !tensor.key_set().has_any(
             c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                  c10::DispatchKey::ZeroTensor, c10::DispatchKey::Functionalize}));
}

/// The range of a tensor's elements in its storage [bytes].
struct Extent {
  int64_t begin, end, bytes;  ///< `bytes`: of the elements, without gaps
};

std::optional<Extent> extent_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return std::nullopt;
  const auto each = static_cast<int64_t>(tensor.dtype().itemsize());
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const int64_t begin = tensor.storage_offset() * each, end = begin + (last + 1) * each;
  if (end > static_cast<int64_t>(tensor.storage().nbytes())) return std::nullopt;
  return Extent{begin, end, std::min(tensor.numel(), last + 1) * each};
}

/// Returns whether `saved` has the memory of `*stands_for`. A kept result may be a copy on the CPU
/// already.
bool is_alias(const at::Tensor& saved, const at::Tensor* stands_for) {
  if (stands_for == nullptr) return false;
  return !saved.has_storage() || !stands_for->has_storage() ||
         saved.storage().unsafeGetStorageImpl() == stands_for->storage().unsafeGetStorageImpl();
}

/// Returns the range that moves with a tensor, if it moves: Note [What is moved].
std::optional<Extent> range_of(const at::Tensor& tensor, bool keeps_bytes) {
  const auto own = extent_of(tensor);
  if (!own) return std::nullopt;
  const int64_t limit = std::max(max_spread * own->bytes, small_bytes);
  const auto each = keeps_bytes ? 1 : static_cast<int64_t>(tensor.dtype().itemsize());
  const int64_t all = static_cast<int64_t>(tensor.storage().nbytes()) / each * each;
  if (all <= limit) return Extent{0, all, own->bytes};
  if (own->end - own->begin <= limit) return own;
  return std::nullopt;
}

const char* bytes_of(const at::Tensor& tensor) {
  return static_cast<const char*>(tensor.storage().data());
}

uint64_t hash_of(const at::Tensor& tensor, int64_t begin, int64_t end) {
  return hash_of_bytes(bytes_of(tensor) + begin, static_cast<std::size_t>(end - begin));
}

}  // namespace

bool is_parameter(const at::Tensor& tensor) {
  const at::Tensor& root = seam::viewed(tensor);
  return seam::requires_grad_itself(root) && seam::node_of(root) == nullptr;
}

SavedElsewhere::SavedElsewhere(const at::Tensor& saved)
    // Without history the tensor makes no cycle: Note [Identity packs]. As an alias it keeps the
    // storage of the save when the tensor gets another one (`set_data`).
    : in_place_(saved.requires_grad() || is_plain(saved) ? saved.tensor_data() : saved),
      had_elements_(is_plain(saved) && extent_of(saved)) {
  if (saved.is_inference()) return;
  counter_ = saved.unsafeGetTensorImpl()->version_counter();
  version_ = static_cast<uint32_t>(saved._version());
}

void SavedElsewhere::check_version() const {
  const bool is_changed = counter_.enabled() && counter_.current_version() != version_;
  TORCH_CHECK(
      !is_changed,
      "one of the variables needed for gradient computation has been modified by an inplace "
      "operation: [",
      in_place_.defined() ? in_place_.toString() : std::string(dtype_.name()), " ",
      in_place_.defined() ? in_place_.sizes() : c10::IntArrayRef(sizes_), "] is at version ",
      counter_.current_version(), "; expected version ", version_,
      " instead.\nCause: a tensor that backward needs was changed in place after it was "
      "saved; plain autograd refuses this too.\nHint: use the out-of-place operator there.");
  TORCH_CHECK(!had_elements_ || !in_place_.defined() || extent_of(in_place_),
              "remat: the storage of a saved tensor was made smaller before backward read it.\n"
              "Cause: the storage was resized, as programs do to free parameters.\n"
              "Hint: restore the storage before backward.");
}

c10::Storage SavedElsewhere::storage_in_place() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return in_place_.defined() ? in_place_.storage() : c10::Storage();
}

at::Tensor SavedElsewhere::unpack() {
  std::shared_ptr<Piece> piece;
  at::Tensor in_place;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (piece_ == nullptr || raises_if_changed_) check_version();
    if (piece_ == nullptr) in_place = in_place_;
    piece = piece_;
  }
  if (piece == nullptr) {
    if (order_ != nullptr) order_->prefetch_before(number_);
    return in_place;
  }
  at::Tensor tensor = rebuild(*piece);
  if (raises_if_changed_) check_version();  // the copy out may have ended meanwhile
  return tensor;
}

SavedElsewhere::Contents SavedElsewhere::contents() {
  std::shared_ptr<Piece> piece;
  Contents found;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    piece = piece_;
    if (piece == nullptr) {
      check_version();
      found = {in_place_.storage(), in_place_.unsafeGetTensorImpl()->version_counter(),
               in_place_.storage_offset()};
    }
  }
  if (piece == nullptr) {
    if (order_ != nullptr) order_->prefetch_before(number_);
    return found;
  }
  Piece::Loaded loaded = piece->load();
  return {std::move(loaded.storage), loaded.counter, offset_, loaded.is_new, loaded.was_begun};
}

at::Tensor SavedElsewhere::rebuild(Piece& piece) const {
  Piece::Loaded loaded = piece.load();
  const Unseen unseen;
  at::Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(std::move(loaded.storage), keys_, dtype_);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef(sizes_),
                                                      c10::IntArrayRef(strides_), offset_);
  tensor.unsafeGetTensorImpl()->set_version_counter(loaded.counter);
  return tensor;
}

Depot::Depot(std::shared_ptr<Place> place, DepotOptions options, DepotSurroundings surroundings)
    : place_(std::move(place)),
      is_comparable_(dynamic_cast<const ComparablePlace*>(place_.get()) != nullptr),
      options_(std::move(options)),
      surroundings_(surroundings),
      order_(options_.prefetch_depth > 0 ? std::make_shared<PrefetchOrder>(
                                               static_cast<std::size_t>(options_.prefetch_depth),
                                               options_.staying, surroundings.at_end)
                                         : nullptr) {}

bool Depot::moves(const at::Tensor& tensor) const {
  if (options_.skip_parameters && is_parameter(tensor)) return false;
  if (!is_plain(tensor) || !place_->takes(tensor)) return false;
  const auto range = range_of(tensor, place_->stores_bytes());
  return range && range->bytes >= options_.min_bytes && tensor.storage().data() != nullptr;
}

std::shared_ptr<SavedElsewhere> Depot::take(const at::Tensor& saved, const at::Tensor* stands_for) {
  const uint64_t operator_number = at::sequence_number::peek();
  if (has_unsettled_.load(std::memory_order_relaxed)) settle_other_operators(operator_number);
  auto taken = std::make_shared<SavedElsewhere>(saved);
  taken->raises_if_changed_ = options_.raises_if_changed;
  const at::Tensor& judged = is_alias(saved, stands_for) ? *stands_for : saved;
  if (!moves(judged)) return taken;
  const bool is_trusted = judged.requires_grad();
  if (options_.staying != nullptr) {
    const SavingOperator by{std::this_thread::get_id(), operator_number};
    stay(taken, judged,
         {taken, by, std::nullopt, is_trusted, is_trusted || stands_for != nullptr, 0});
    move_excess(judged.device(), &by);
    return taken;
  }
  if (is_trusted || stands_for != nullptr) {
    move(*taken, {.is_trusted = is_trusted});
  } else {
    std::optional<c10::Stream> stream;
    if (!saved.is_cpu()) stream = current_stream(saved.device());
    const std::lock_guard<std::mutex> lock(mutex_);
    unsettled_.push_back({std::this_thread::get_id(), operator_number, std::move(stream), taken});
    has_unsettled_.store(true, std::memory_order_relaxed);
  }
  return taken;
}

std::shared_ptr<Piece> Depot::keep(const at::Tensor& dense, uint64_t number) {
  const int64_t begin = dense.storage_offset() * static_cast<int64_t>(dense.dtype().itemsize());
  return piece_for(dense, begin, begin + static_cast<int64_t>(dense.nbytes()),
                   {.is_trusted = false, .number = number});
}

std::shared_ptr<SavedElsewhere> Depot::keep_in_place(const at::Tensor& value, StayAs as) {
  if (options_.staying == nullptr || !moves(value)) return nullptr;
  auto kept = std::make_shared<SavedElsewhere>(value);
  stay(kept, value,
       {.saved = kept,
        .by = {},
        .stream = std::nullopt,
        .is_trusted = false,
        .is_complete = true,
        .number = as.number,
        .has_to_move = as.has_to_move,
        .on_move = std::move(as.on_move)});
  return kept;
}

void Depot::move_excess() {
  if (options_.staying == nullptr) return;
  for (const c10::Device device : options_.staying->devices()) move_excess(device, nullptr);
}

void Depot::stay(const std::shared_ptr<SavedElsewhere>& saved, const at::Tensor& judged,
                 Staying::Entry entry) {
  if (!judged.is_cpu()) entry.stream = current_stream(judged.device());
  if (order_ != nullptr) {
    if (entry.number == 0) entry.number = order_->next_number();
    saved->order_ = order_;
    saved->number_ = entry.number;
  }
  saved->share_ = options_.staying->share_of(judged);
  options_.staying->add(judged.device(), std::move(entry));
}

void Depot::move_excess(c10::Device device, const SavingOperator* running) {
  const uint64_t batch = ++num_batches_;
  std::exception_ptr failure;
  for (Staying::Entry& each : options_.staying->take_excess(device, running)) {
    const auto saved = std::static_pointer_cast<SavedElsewhere>(each.saved.lock());
    if (saved == nullptr) continue;
    std::optional<OnStream> as_then;
    if (each.stream) as_then.emplace(*each.stream);
    try {
      move(*saved, {.is_trusted = each.is_trusted, .number = each.number, .batch = batch});
      if (each.on_move && !saved->storage_in_place()) each.on_move();
    } catch (const std::exception& error) {  // pieces throw nothing else
      if (each.has_to_move) {
        if (failure == nullptr) failure = std::current_exception();
        options_.staying->add(device, std::move(each));  // the next save tries it again
        continue;
      }
      seam::warn(c10::str("remat: a saved tensor stays in memory, since it could not be moved: ",
                          seam::text_of(error)));
    }
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

std::vector<Depot::Unsettled> Depot::take_unsettled(const uint64_t* but_operator) {
  std::vector<Unsettled> mine;
  const auto here = std::this_thread::get_id();
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(unsettled_, [&](Unsettled& each) {
    if (each.thread != here) return each.saved.expired();
    if (but_operator != nullptr && each.operator_number == *but_operator) return false;
    mine.push_back(std::move(each));
    return true;
  });
  has_unsettled_.store(!unsettled_.empty(), std::memory_order_relaxed);
  return mine;
}

void Depot::settle(const Unsettled& unsettled) {
  const auto saved = unsettled.saved.lock();
  if (saved == nullptr) return;
  std::optional<OnStream> as_then;
  if (unsettled.stream) as_then.emplace(*unsettled.stream);
  move(*saved, {.is_trusted = false});
}

void Depot::settle_other_operators(uint64_t operator_number) {
  for (const Unsettled& each : take_unsettled(&operator_number)) settle(each);
}

void Depot::settle() noexcept {
  if (options_.staying == nullptr && !has_unsettled_.load(std::memory_order_relaxed)) return;
  try {
    const auto mine = take_unsettled(nullptr);
    // An exception leaves the guard: an operator may be half done.
    if (std::uncaught_exceptions() > 0) return;
    if (options_.staying != nullptr)
      for (const c10::Device device : options_.staying->devices()) move_excess(device, nullptr);
    for (const Unsettled& each : mine) settle(each);
  } catch (const std::exception& error) {  // pieces throw nothing else
    seam::warn(c10::str("remat: a saved tensor stays in memory, since it could not be moved: ",
                        seam::text_of(error)));
  }
}

void Depot::move(SavedElsewhere& saved, const MoveAs& as) {
  // No other thread moves it. It is freed after the lock, since its storage may run a deleter of
  // the user's.
  at::Tensor tensor = saved.in_place_;
  const auto is_changed = [&] {
    return saved.counter_.enabled() && saved.counter_.current_version() != saved.version_;
  };
  if (is_changed()) return;
  const auto range = range_of(tensor, place_->stores_bytes());
  if (!range) return;
  auto piece = piece_for(tensor, range->begin, range->end, as);
  if (piece == nullptr || is_changed()) return;
  const std::lock_guard<std::mutex> lock(saved.mutex_);
  saved.sizes_.assign(tensor.sizes().begin(), tensor.sizes().end());
  saved.strides_.assign(tensor.strides().begin(), tensor.strides().end());
  saved.offset_ =
      tensor.storage_offset() - piece->begin() / static_cast<int64_t>(tensor.dtype().itemsize());
  saved.keys_ = tensor.key_set();
  saved.dtype_ = tensor.dtype();
  saved.raises_if_changed_ |= piece->is_stored_late();
  saved.piece_ = std::move(piece);
  saved.in_place_.reset();
  saved.share_.reset();
}

void Depot::finish_stores_before(int64_t bytes) {
  for (;;) {
    std::shared_ptr<Piece> oldest;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (!storing_.empty() && storing_.front().piece.expired()) {
        storing_bytes_ -= storing_.front().bytes;
        storing_.pop_front();
      }
      if (storing_.empty() || storing_bytes_ + bytes <= options_.max_bytes_in_flight) return;
      oldest = storing_.front().piece.lock();
      storing_bytes_ -= storing_.front().bytes;
      storing_.pop_front();
    }
    if (oldest != nullptr) oldest->finish_store();
  }
}

/// Returns whether the piece has the present contents of a tensor in its range.
bool Depot::is_same(const Known& known, const Piece& piece, const at::Tensor& tensor,
                    const MoveAs& as) const {
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  if (!counter.enabled() || !seam::is_same_counter(counter, known.counter) ||
      counter.current_version() != known.version)
    return false;
  if (!tensor.is_cpu()) return as.is_trusted && known.is_trusted;
  if (static_cast<int64_t>(tensor.storage().nbytes()) < known.end) return false;
  if (as.batch != 0 && as.batch == known.batch) return true;
  return is_comparable_ ? piece.has_bytes_of(bytes_of(tensor) + known.begin)
                        : hash_of(tensor, known.begin, known.end) == known.hash;
}

std::shared_ptr<Piece> Depot::piece_for(const at::Tensor& tensor, int64_t begin, int64_t end,
                                        const MoveAs& as) {
  const c10::StorageImpl* const source = tensor.storage().unsafeGetStorageImpl();
  const auto kind = place_->stores_bytes() ? c10::kByte : tensor.scalar_type();
  std::vector<std::pair<Known, std::shared_ptr<Piece>>> known;  // dies after the lock
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = known_.find(source); found != known_.end())
      for (const Known& each : found->second)
        if (auto piece = each.piece.lock()) known.emplace_back(each, std::move(piece));
  }
  for (const auto& [each, piece] : known)
    if (each.kind == kind && each.begin <= begin && each.end >= end &&
        is_same(each, *piece, tensor, as))
      return piece;
  if (bounds_stores()) finish_stores_before(end - begin);
  auto piece = std::make_shared<Piece>(place_, surroundings_.around, options_.totals, tensor, begin,
                                       end, kind);
  // The hash is taken before the copy: a place may allow writes to the tensor meanwhile.
  const bool is_hashed = tensor.is_cpu() && !is_comparable_;
  Known made{piece,
             begin,
             end,
             kind,
             tensor.unsafeGetTensorImpl()->version_counter(),
             static_cast<uint32_t>(tensor._version()),
             as.is_trusted,
             as.batch,
             is_hashed ? hash_of(tensor, begin, end) : 0};
  if (!piece->begin_store(tensor)) return nullptr;
  if (order_ != nullptr) {
    const uint64_t number = as.number == 0 ? order_->next_number() : as.number;
    order_->add(number, piece);
    piece->set_order(order_, number);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto is_gone = [](const Known& each) { return each.piece.expired(); };
  std::vector<Known>& of_source = known_[source];
  std::erase_if(of_source, is_gone);
  of_source.push_back(std::move(made));
  if (known_.size() > max_known_) {
    std::erase_if(known_, [&](const auto& each) {
      return std::all_of(each.second.begin(), each.second.end(), is_gone);
    });
    max_known_ = std::max(max_known_, 2 * known_.size());
  }
  if (piece->is_stored_late() && bounds_stores()) {
    storing_.push_back({piece, end - begin});
    storing_bytes_ += end - begin;
  }
  return piece;
}

}  // namespace remat
