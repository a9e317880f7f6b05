#include "lib/selective/kept_tensor.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>

#include <typeinfo>
#include <utility>

#include "hooks/depot/depot.h"
#include "hooks/depot/piece.h"
#include "lib/base/counters.h"
#include "lib/base/error.h"
#include "lib/scope/saving_input.h"
#include "lib/seam/autograd_meta.h"
#include "lib/seam/storage.h"
#include "lib/selective/kept_moves.h"
#include "lib/tensor/capture.h"

namespace remat {

// Throws if the value cannot be copied, and then changes nothing.
void KeptTensor::move(const at::Tensor& value, bool meets_hooks, const KeptPlace& place) {
  if (meets_hooks || !move_to_depot(value, place)) {
    tensor_ = value.tensor_data().to(c10::kCPU);
    if (place.is_beside) note_version(value);
  }
  is_copy_ = true;
}

/// Returns false if the depot cannot move the value.
bool KeptTensor::move_to_depot(const at::Tensor& value, const KeptPlace& place) {
  if (!metadata_ || value.numel() == 0 || !value.is_non_overlapping_and_dense()) return false;
  has_to_move_ = place.where == KeptWhere::OnCpu;
  late_ = place.moves->keep_in_place(value, has_to_move_, place.on_late_move);
  if (late_ == nullptr) {
    moved_ = place.moves->move(value, place.is_beside, has_to_move_);
    if (moved_ == nullptr) return false;
    metadata_->offset = 0;
  }
  if (late_ != nullptr || (place.is_beside && moved_->is_stored_late())) note_version(value);
  return true;
}

void KeptTensor::note_version(const at::Tensor& value) {
  counter_ = value.unsafeGetTensorImpl()->version_counter();
  version_ = counter_.current_version();
}

KeptTensor::KeptTensor(const at::Tensor& value, const detail::Scope& region,
                       detail::HooksAround hooks, const KeptPlace& place)
    : storage_(storage_of(value)), is_defined_(value.defined()) {
  if (!is_defined_) return;
  if (storage_ != nullptr) {
    device_ = storage_->device();
    num_bytes_ = static_cast<int64_t>(value.nbytes());
  }
  if (can_be_taken_apart(value)) {
    const c10::TensorImpl& impl = *value.unsafeGetTensorImpl();
    metadata_.emplace(Metadata{impl.key_set(), impl.dtype(), {}, impl.storage_offset()});
    metadata_->layout.set_sizes(impl.sizes());
    metadata_->layout.set_strides(impl.strides());
  }
  const bool meets_hooks = detail::may_meet_hooks_around(region, hooks);
  if (place.where != KeptWhere::InPlace && !value.is_cpu()) {
    const bool must_move = place.where == KeptWhere::OnCpu;
    if (can_be_moved(value)) {
      try {
        move(value, meets_hooks, place);
      } catch (const c10::Error&) {  // such as a lack of host memory
        // An enclosing region expects the value on one device, in forward and in each recompute.
        if (must_move || meets_hooks) throw;
      }
    } else if (must_move) {
      throw_unsupported("a policy answered MustCpuOffload for a result that cannot be moved",
                        "sparse, nested, quantized and meta tensors stay where they are",
                        "answer PreferCpuOffload, which keeps such a result on its device");
    }
    could_not_move_ = !is_copy_;
    count(is_copy_ ? live_counters.offloads : live_counters.offload_fallbacks);
  }
  if (!is_copy_ && !value.is_inference()) note_version(value);
  if (moved_ != nullptr || late_ != nullptr) return;
  if (!is_copy_ && metadata_ && !meets_hooks) {
    data_ = value.storage();
    return;
  }
  if (!is_copy_) tensor_ = value.tensor_data();
  if (tensor_.is_inference() || !meets_hooks) return;
  const detail::SaveAround around(region, hooks);
  const SavingInput saving(value);
  saved_ = std::make_unique<torch::autograd::SavedVariable>(std::exchange(tensor_, {}),
                                                            /*is_output=*/false);
}

bool KeptTensor::is_changed() const {
  return was_changed_ || (counter_.enabled() && counter_.current_version() != version_);
}

TensorIdentity KeptTensor::identity() const {
  TensorIdentity identity;
  if (data_) identity.storage = data_.getWeakStorageImpl();
  return identity;
}

bool KeptTensor::shares_version_with(const at::Tensor& tensor) const {
  return counter_.enabled() &&
         seam::is_same_counter(counter_, tensor.unsafeGetTensorImpl()->version_counter());
}

// All calls are inlined, since a tensor is built for each replayed result.
[[gnu::flatten]] at::Tensor KeptTensor::build(c10::Storage storage, int64_t offset) const {
  std::optional<c10::InferenceMode> normal;  // like the original: it has a version
  if (c10::InferenceMode::is_enabled()) normal.emplace(false);
  at::Tensor built = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), metadata_->keys,
                                                              metadata_->dtype);
  built.unsafeGetTensorImpl()->set_sizes_and_strides(metadata_->layout.sizes_arrayref(),
                                                     metadata_->layout.strides_arrayref(), offset);
  return built;
}

/// Restores the strides: a copy of a tensor with gaps or repetitions has neither, but forward's
/// saved tensor had them.
at::Tensor KeptTensor::moved_back(const at::Tensor& copy, std::optional<Load>* load) const {
  if (load != nullptr) *load = Load{num_bytes_};
  const at::Tensor there = copy.to(device_);
  if (!metadata_ || there.strides().equals(metadata_->layout.strides_arrayref())) return there;
  // The strides of a few numbers from a large tensor are not restored: all gaps would be allocated.
  constexpr int64_t max_gaps = 4, always_allowed_bytes = 1 << 20;
  int64_t extent = 1;
  for (int64_t i = 0; i < there.dim(); ++i)
    extent += (there.size(i) - 1) * metadata_->layout.stride_at(static_cast<std::size_t>(i));
  const bool is_large = extent * static_cast<int64_t>(there.element_size()) > always_allowed_bytes;
  if (there.numel() == 0 || (is_large && extent > max_gaps * there.numel())) return there;
  at::Tensor value =
      at::empty_strided(there.sizes(), metadata_->layout.strides_arrayref(), there.options());
  at::Tensor into = value, from = there;
  for (int64_t i = 0; i < into.dim(); ++i)
    if (into.stride(i) == 0 && into.size(i) > 1) {
      into = into.narrow(i, 0, 1);
      from = from.narrow(i, 0, 1);
    }
  into.copy_(from);
  return value;
}

at::Tensor KeptTensor::restore(std::optional<Load>* load) const {
  if (!is_defined_) return {};
  // `saved_` checks the same: the value was written to after the check for changes.
  TORCH_CHECK(saved_ != nullptr || !is_changed(),
              "remat: a kept value was changed in place while a recompute read it");
  if (moved_ != nullptr) {
    Piece::Loaded loaded = moved_->load();
    if (load != nullptr && loaded.is_new) *load = {num_bytes_, loaded.was_begun};
    at::Tensor value = build(std::move(loaded.storage), metadata_->offset);
    value.unsafeGetTensorImpl()->set_version_counter(loaded.counter);
    return value;
  }
  if (late_ != nullptr) {
    SavedElsewhere::Contents contents = late_->contents();
    if (load != nullptr && contents.is_new) *load = {num_bytes_, contents.was_begun};
    at::Tensor value = build(std::move(contents.storage), contents.offset);
    value.unsafeGetTensorImpl()->set_version_counter(contents.counter);
    return value;
  }
  if (!data_) return restore(saved_ != nullptr ? saved_->unpack() : tensor_, load);
  at::Tensor value = build(data_, metadata_->offset);
  value.unsafeGetTensorImpl()->set_version_counter(counter_);
  return value;
}

at::Tensor KeptTensor::restore(const at::Tensor& fetched, std::optional<Load>* load) const {
  return is_copy_ ? moved_back(fetched, load) : fetched.tensor_data();
}

KeptTensor::Unfinished KeptTensor::end_forward() {
  if (!is_copy_ || late_ != nullptr || !counter_.enabled()) return {};
  was_changed_ = is_changed();
  counter_ = c10::VariableVersion(c10::VariableVersion::DISABLED);
  if (moved_ == nullptr) return {};
  const bool is_written_to = moved_->is_source_alive();
  return {is_written_to || has_to_move_ ? moved_ : nullptr, is_written_to};
}

bool KeptTensor::can_be_moved(const at::Tensor& value) {
  return value.layout() == c10::kStrided && !value.is_nested() && value.has_storage() &&
         !value.is_meta() && !value.is_quantized();
}

bool KeptTensor::can_be_taken_apart(const at::Tensor& value) {
  c10::TensorImpl& impl = *value.unsafeGetTensorImpl();
  return typeid(impl) == typeid(c10::TensorImpl) && storage_of(value) != nullptr &&
         impl.layout() == c10::kStrided && !impl.is_inference() && !impl.is_python_dispatch() &&
         !impl.has_symbolic_sizes_strides() && !seam::has_names(impl) &&
         !impl.is_wrapped_number() && impl.get_backend_meta() == nullptr;
}

}  // namespace remat
