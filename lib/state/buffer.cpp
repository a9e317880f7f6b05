#include "lib/state/buffer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <cstring>
#include <unordered_map>
#include <utility>

#include "lib/base/planted_fault.h"
#include "lib/seam/lazy_copy.h"
#include "lib/tensor/content_hash.h"

namespace remat {

struct Buffer::State {
  at::Tensor alias;     ///< with the storage and shape at that time
  at::Tensor contents;  ///< undefined if there is no copy
  uint32_t version = 0;
  uint64_t num_norms = 0;
  bool is_lazy = false;  ///< whether the copy is lazy
};

namespace {

/// Maps objects owned elsewhere to values. Entries of dead objects are removed when the map has
/// doubled.
template <class Weak, class Value>
class WeakMap {
 public:
  template <class Visitor>
  auto with(const Weak& object, Visitor&& visitor) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const void* const address = object._unsafe_get_target();
    auto found = all_.find(address);
    if (found != all_.end() && found->second.first.expired()) {
      all_.erase(found);
      found = all_.end();
    }
    if (found == all_.end()) {
      if (all_.size() >= next_sweep_) {
        std::erase_if(all_, [](const auto& each) { return each.second.first.expired(); });
        next_sweep_ = 2 * all_.size() + first_sweep;
      }
      found = all_.try_emplace(address, object, Value()).first;
    }
    return visitor(found->second.second);
  }
  /// Returns the value of an object, or a default value if the map does not have it.
  Value of(const void* address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = all_.find(address);
    return found == all_.end() || found->second.first.expired() ? Value() : found->second.second;
  }

 private:
  static constexpr std::size_t first_sweep = 64;
  std::mutex mutex_;
  std::unordered_map<const void*, std::pair<Weak, Value>> all_;
  std::size_t next_sweep_ = first_sweep;
};

/// Returns the counts of batch norm runs by the storage of the statistics.
WeakMap<WeakStorage, uint64_t>& norms() {
  static auto* const all = new WeakMap<WeakStorage, uint64_t>;  // leaked: graphs may die late
  return *all;
}

/// The observations of forwards on a buffer that cannot be copied lazily.
struct Taught {
  int num_forwards = 0;
  bool is_written = false;
};
constexpr int num_teaching = 2;
WeakMap<WeakTensor, Taught>& taught() {
  static auto* const all = new WeakMap<WeakTensor, Taught>;  // leaked, too
  return *all;
}

bool is_plain_buffer(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_meta() &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch() && storage_of(tensor) != nullptr &&
         !has_no_memory(tensor);
}

/// Returns whether the elements are in memory without gaps, each once.
bool is_dense_on_cpu(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.is_non_overlapping_and_dense() &&
         !tensor.is_quantized();
}

bool has_same_memory(const at::Tensor& a, const at::Tensor& b) {
  return is_plain_buffer(a) && is_plain_buffer(b) &&
         storage_of(a)->data() == storage_of(b)->data() &&
         a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides();
}

/// Returns whether two tensors are equal bit by bit; false if a comparison would need a copy, or
/// wait for a device.
bool has_same_bits(const at::Tensor& a, const at::Tensor& b) {
  return is_plain_buffer(a) && is_plain_buffer(b) && is_dense_on_cpu(a) && is_dense_on_cpu(b) &&
         a.sizes() == b.sizes() && a.strides() == b.strides() && a.dtype() == b.dtype() &&
         (a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

/// Hides writes from the version counter: for the graph the buffer is never written.
struct Unseen {
  const at::AutoDispatchBelowADInplaceOrView below;
};

/// The objects of all buffers.
class Buffers {
 public:
  std::shared_ptr<Buffer> of(const at::Tensor& buffer, const std::shared_ptr<Buffer>& before) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::weak_ptr<Buffer>& known = all_[buffer.unsafeGetTensorImpl()];
    if (auto found = known.lock()) return found;
    auto made = std::make_shared<Buffer>(buffer, before);
    known = made;
    return made;
  }
  void forget(const at::Tensor& buffer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = all_.find(buffer.unsafeGetTensorImpl());
    // Another thread may have made a new object since the last owner of this one released it.
    if (found != all_.end() && found->second.expired()) all_.erase(found);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const at::TensorImpl*, std::weak_ptr<Buffer>> all_;
};

Buffers& buffers() {
  static auto* const all = new Buffers;  // leaked: graphs may die in static destructors
  return *all;
}

}  // namespace

void note_norm(const c10::StorageImpl& storage) {
  auto& known = const_cast<c10::StorageImpl&>(storage);
  norms().with(
      WeakStorage(c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(&known)),
      [](uint64_t& number) { ++number; });
}

std::shared_ptr<Buffer> Buffer::of(const at::Tensor& buffer,
                                   const std::shared_ptr<Buffer>& before) {
  return buffers().of(buffer, before);
}

Buffer::Buffer(at::Tensor buffer, const std::shared_ptr<Buffer>& before)
    : buffer_(std::move(buffer)),
      before_(before == nullptr || storage_of(before->buffer_) == nullptr
                  ? WeakStorage(c10::intrusive_ptr<c10::StorageImpl>())
                  : weak_storage_of(before->buffer_)) {}

Buffer::~Buffer() { buffers().forget(buffer_); }

uint32_t Buffer::version() const {
  return buffer_.is_inference() ? 0 : static_cast<uint32_t>(buffer_._version());
}

// A batch norm's counter of calls follows its statistics. It may have any type: `to(dtype)` of a
// C++ module converts it, too.
bool Buffer::is_counter() const { return buffer_.dim() == 0; }

uint64_t Buffer::num_norms() const {
  if (is_counter()) return norms().of(before_._unsafe_get_target());
  return norms().of(storage_of(buffer_));
}

bool Buffer::has_layout_of(const at::Tensor& other) const {
  return buffer_.layout() == other.layout() && buffer_.dtype() == other.dtype() &&
         buffer_.device() == other.device() && buffer_.sizes() == other.sizes() &&
         (buffer_.layout() != at::kStrided ||
          (buffer_.strides() == other.strides() && buffer_.is_alias_of(other) &&
           buffer_.storage_offset() == other.storage_offset()));
}

bool Buffer::shares_memory(const State& state) const {
  return state.contents.defined() && has_same_memory(state.contents, buffer_);
}

/// Returns a lazy copy; undefined if it would have to be made at once.
at::Tensor Buffer::lazy_copy(const at::Tensor& alias) {
  c10::StorageImpl* const storage = storage_of(buffer_);
  auto copy = last_copy_.lock();
  if (!copy || copy->data() != storage->data() || copy->nbytes() != storage->nbytes())
    copy = seam::lazy_copy(*storage);
  if (!copy) return {};
  last_copy_ = WeakStorage(copy);
  auto made = alias.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true);
  made->set_storage_keep_dtype(c10::Storage(std::move(copy)));
  return at::Tensor(std::move(made));
}

std::any Buffer::note() {
  const c10::InferenceMode normal(false);
  State now{buffer_.tensor_data(), {}, version(), num_norms()};
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!is_plain_buffer(buffer_)) {
    if (taught().of(buffer_.unsafeGetTensorImpl()).is_written) now.contents = now.alias.clone();
    return now;
  }
  if (buffer_.numel() == 0) return now;
  now.contents = lazy_copy(now.alias);
  now.is_lazy = now.contents.defined();
  if (now.is_lazy) return now;
  const Taught earlier = taught().of(buffer_.unsafeGetTensorImpl());
  if (earlier.is_written || earlier.num_forwards < num_teaching) now.contents = now.alias.clone();
  return now;
}

std::any Buffer::capture() {
  const c10::InferenceMode normal(false);
  State now{buffer_.tensor_data(), {}, version(), num_norms()};
  if (buffer_.is_meta() || has_no_memory(buffer_)) return now;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_plain_buffer(buffer_) && buffer_.numel() > 0) now.contents = lazy_copy(now.alias);
  now.is_lazy = now.contents.defined();
  if (!now.contents.defined()) now.contents = now.alias.clone();
  return now;
}

void Buffer::restore(const std::any& state) {
  const State& wanted = std::any_cast<const State&>(state);
  const c10::InferenceMode normal(buffer_.is_inference());
  const Unseen unseen;
  if (!has_layout_of(wanted.alias) && !is_planted(Fault::BufferLayout))
    buffer_.unsafeGetTensorImpl()->shallow_copy_from(wanted.alias.getIntrusivePtr());
  // Equal contents are not written: another thread may be reading.
  if (wanted.contents.defined() && !shares_memory(wanted) &&
      !has_same_bits(wanted.contents, buffer_)) {
    if (is_plain_buffer(buffer_))
      buffer_.copy_(wanted.contents);
    else
      buffer_.unsafeGetTensorImpl()->shallow_copy_from(wanted.contents.clone().getIntrusivePtr());
  }
  if (buffer_.is_inference() || is_planted(Fault::BufferVersion)) return;
  c10::VariableVersion shared = buffer_.unsafeGetTensorImpl()->version_counter();
  shared.set_version(wanted.version);
}

std::any Buffer::state_of(const at::Tensor& tensor) { return State{tensor, tensor}; }

bool Buffer::is_as(const at::Tensor& tensor, const std::any& state) {
  const at::Tensor& then = std::any_cast<const State&>(state).contents;
  if (!then.defined()) return true;
  if (then.layout() != tensor.layout() || then.dtype() != tensor.dtype() ||
      then.sizes() != tensor.sizes() || then.device() != tensor.device())
    return false;
  if (has_same_memory(then, tensor) || has_same_bits(then, tensor)) return true;
  const Unseen unseen;
  const c10::InferenceMode normal(false);
  const c10::AutoGradMode no_grad(false);
  const at::Tensor now = tensor.tensor_data();
  if (tensor.device().is_cpu() || !is_plain_buffer(tensor))
    return content_hash(then) == content_hash(now);
  constexpr double tolerance = 1e-3, smallest = 1e-6;
  return at::isFloatingType(now.scalar_type()) || at::isComplexType(now.scalar_type())
             ? at::allclose(now, then, tolerance, smallest, /*equal_nan=*/true)
             : at::equal(now, then);
}

bool Buffer::has_contents(const std::any& note) const {
  const State& state = std::any_cast<const State&>(note);
  if (state.alias.numel() == 0 && state.alias.layout() == at::kStrided) return true;
  // A buffer whose version changed without a write (squeeze_), or by a write that bypassed
  // LibTorch's pointers, still shares memory.
  return state.contents.defined() && !(shares_memory(state) && has_layout_of(state.alias));
}

Written Buffer::written_since(const std::any& note, bool is_inner) {
  const State& begin = std::any_cast<const State&>(note);
  const uint64_t num_norms_now = num_norms();
  const bool by_norm = num_norms_now != begin.num_norms;
  const auto is_written = [&] {
    if (!has_layout_of(begin.alias) || version() != begin.version) return true;
    if (begin.is_lazy) return !shares_memory(begin) && !has_same_bits(begin.contents, buffer_);
    if (by_norm && !is_counter()) return true;
    if (!begin.contents.defined()) return false;
    const Taught earlier = taught().of(buffer_.unsafeGetTensorImpl());
    return earlier.is_written || !is_as(note);  // the first forwards wait for a device
  };
  const bool result = is_written();
  if (!begin.is_lazy && (result || begin.contents.defined()))
    taught().with(WeakTensor(buffer_.getIntrusivePtr()), [&](Taught& each) {
      each.num_forwards += is_inner ? 0 : 1;
      each.is_written |= result;
    });
  if (!result) return Written::Not;
  return by_norm ? Written::AsStatistics : Written::Otherwise;
}

bool Buffer::is_moved_since(const std::any& note) const {
  const State& begin = std::any_cast<const State&>(note);
  return begin.is_lazy && !shares_memory(begin);
}

bool Buffer::is_touched_since(const std::any& state) {
  const State& then = std::any_cast<const State&>(state);
  return version() != then.version || !is_as(state);
}

bool Buffer::has_writes_of(const std::any& begin, const std::any& left,
                           const std::any& now_began) const {
  const State& first = std::any_cast<const State&>(begin);
  const State& last = std::any_cast<const State&>(left);
  const State& now = std::any_cast<const State&>(now_began);
  return last.version != first.version && version() - now.version >= last.version - first.version;
}

}  // namespace remat
