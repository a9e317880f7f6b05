#include "lib/tensor/capture.h"

#include <ATen/SequenceNumber.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>

#include "lib/base/planted_fault.h"

namespace remat {

namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

uint32_t offset_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? static_cast<uint32_t>(tensor.storage_offset()) : 0;
}

/// Returns the node of the only differentiable argument of `node`, or null if it has none or
/// several.
Node* only_source(const Node& node) {
  Node* source = nullptr;
  for (const auto& edge : node.next_edges()) {
    if (!edge.is_valid()) continue;
    if (source != nullptr) return nullptr;
    source = edge.function.get();
  }
  return source;
}

/// Returns the leaf of which `tensor`, made by `node`, is a cast (as autocast makes and caches
/// them), or a cast of a result of that leaf alone (`weight.t()`); or null. Autocast itself cannot
/// be asked, as it is off while the kernel that saves the cast runs.
const at::Tensor* cast_source(const at::Tensor& tensor, const Node& node) {
  if (!seam::is_cast(node)) return nullptr;
  constexpr int max_steps = 8;
  const Node* made_by = &node;
  for (int step = 0; step < max_steps; ++step) {
    Node* const source = only_source(*made_by);
    if (source == nullptr) return nullptr;
    if (source->sequence_nr() == UINT64_MAX) {  // true of every AccumulateGrad
      auto* const accumulate = dynamic_cast<AccumulateGrad*>(source);
      if (accumulate == nullptr || accumulate->variable.scalar_type() == tensor.scalar_type())
        return nullptr;
      return &accumulate->variable;
    }
    made_by = source;
  }
  return nullptr;
}

bool is_compressed(c10::Layout layout) {
  return layout == c10::kSparseCsr || layout == c10::kSparseCsc || layout == c10::kSparseBsr ||
         layout == c10::kSparseBsc;
}

}  // namespace

WeakStorage weak_storage_of(const at::Tensor& tensor) {
  if (storage_of(tensor) == nullptr) return WeakStorage(c10::intrusive_ptr<c10::StorageImpl>());
  return tensor.unsafeGetTensorImpl()->unsafe_storage().getWeakStorageImpl();
}

at::Tensor sparse_values_of(const at::Tensor& tensor) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  if (impl->key_set().has(c10::DispatchKey::Python)) return {};
  if (const auto* const coo = dynamic_cast<const at::SparseTensorImpl*>(impl)) return coo->values();
  if (const auto* const compressed = dynamic_cast<const at::SparseCsrTensorImpl*>(impl))
    return compressed->values();
  return {};
}

WeakTensor weak_object_of(const at::Tensor& tensor) {
  if (storage_of(tensor) == nullptr && is_compressed(tensor.layout()))
    if (const at::Tensor values = sparse_values_of(tensor); values.defined())
      return WeakTensor(values.getIntrusivePtr());
  return WeakTensor(tensor.getIntrusivePtr());
}

WeakStorage weak_known_storage_of(const at::Tensor& tensor) {
  if (tensor.key_set().has(c10::DispatchKey::Python)) return weak_storage_of(seam::viewed(tensor));
  const at::Tensor values = storage_of(tensor) == nullptr ? sparse_values_of(tensor) : at::Tensor();
  return weak_storage_of(values.defined() ? values : tensor);
}

void StorageSet::add(const at::Tensor& tensor) {
  c10::StorageImpl* const storage = known_storage_of(tensor);
  if (storage == nullptr || contains(storage)) return;
  storages_.push_back(weak_known_storage_of(tensor));
  if (storages_.size() <= max_scanned) return;
  if (index_ == nullptr) index_ = std::make_unique<Index>();
  for (std::size_t i = index_->size(); i < storages_.size(); ++i)
    index_->emplace(storages_[i]._unsafe_get_target(), static_cast<int64_t>(i));
}

int64_t StorageSet::number_of(const c10::StorageImpl* storage) const {
  if (index_ != nullptr) {
    const auto found = index_->find(storage);
    return found == index_->end() ? -1 : found->second;
  }
  for (std::size_t i = 0; i < storages_.size(); ++i)
    if (storages_[i]._unsafe_get_target() == storage) return static_cast<int64_t>(i);
  return -1;
}

WeakStorage StorageSet::weak_at(int64_t number) const {
  if (number < 0 || number >= static_cast<int64_t>(storages_.size()))
    return WeakStorage(c10::intrusive_ptr<c10::StorageImpl>());
  return storages_[static_cast<std::size_t>(number)];
}

void StorageSet::clear() {
  storages_.clear();
  index_.reset();
}

RegionStart RegionStart::here() {
  return {at::sequence_number::peek(), at::RecordFunction::currentThreadId()};
}

const at::Tensor* leaf_behind(const at::Tensor& tensor) {
  const at::Tensor& root = seam::viewed(tensor);
  if (const Node* const node = seam::node_of(root)) return cast_source(root, *node);
  return seam::requires_grad_itself(root) ? &root : nullptr;
}

TensorIdentity TensorIdentity::of(const at::Tensor& tensor) {
  const at::Tensor* const leaf = leaf_behind(tensor);
  TensorIdentity identity;
  identity.object = WeakTensor((leaf == nullptr ? seam::viewed(tensor) : *leaf).getIntrusivePtr());
  identity.storage = weak_known_storage_of(tensor);
  return identity;
}

bool is_made_by_function(const at::Tensor& tensor) {
  const Node* const node = seam::node_of(tensor);
  return node != nullptr && seam::is_function(*node);
}

bool is_built_before(const RegionStart& start, const at::Tensor& tensor) {
  const Node* const node = seam::node_of(seam::viewed(tensor));
  return node != nullptr && node->sequence_nr() < start.sequence &&
         node->thread_id() == start.thread;
}

bool is_built_since(const RegionStart& start, const at::Tensor& tensor) {
  const Node* const node = seam::node_of(tensor);
  return node != nullptr && node->sequence_nr() >= start.sequence &&
         node->thread_id() == start.thread;
}

Provenance provenance_of(const at::Tensor& saved, const RegionStart& start,
                         const StorageSet& inputs) {
  Provenance result;
  result.version = seam::version_of(saved);
  c10::StorageImpl* const storage = known_storage_of(saved);
  if (const at::Tensor* const leaf = leaf_behind(saved)) {
    result.origin = Origin::Leaf;
    const at::Tensor& leaf_tensor = *leaf;
    if (leaf_tensor.scalar_type() != saved.scalar_type()) {
      result.cast = weak_known_storage_of(saved);
      result.cast_version = result.version;
    }
    result.version = seam::version_of(leaf_tensor);
    result.storage = weak_known_storage_of(leaf_tensor);
    result.leaf = WeakTensor(leaf_tensor.getIntrusivePtr());
    result.offset = offset_of(leaf_tensor);
    result.shares_leaf = known_storage_of(leaf_tensor) == storage;
    return result;
  }
  if (storage == nullptr) return result;
  if (inputs.contains(storage)) {
    result.origin = Origin::Input;
    result.storage = weak_known_storage_of(saved);
    return result;
  }
  const at::Tensor& root = seam::viewed(saved);
  const bool built_inside = is_built_since(start, root);
  result.origin = built_inside ? Origin::Inside : Origin::Outside;
  if (!built_inside) {
    result.leaf = weak_object_of(root);
    result.offset = offset_of(saved);
  }
  // An inside tensor that was never changed in place is not a captured one, so its storage is not
  // needed.
  if (!(built_inside && result.version == 0)) result.storage = weak_known_storage_of(saved);
  return result;
}

bool is_replaced(const Provenance& then, const at::Tensor& now) {
  return (then.origin == Origin::Outside || then.origin == Origin::Input) &&
         known_storage_of(now) != then.storage._unsafe_get_target();
}

namespace {
bool is_leaf_changed(const Provenance& then, const at::Tensor& leaf) {
  return seam::version_of(leaf) != then.version ||
         known_storage_of(leaf) != then.storage._unsafe_get_target() ||
         offset_of(leaf) != then.offset;
}
}  // namespace

bool is_leaf_changed(const Provenance& then) {
  if (then.origin != Origin::Leaf) return false;
  const auto leaf = then.leaf.lock();
  return leaf && is_leaf_changed(then, at::Tensor(leaf));  // a dead leaf was made inside
}

bool is_changed(const Provenance& then, const at::Tensor& now) {
  if (is_planted(Fault::CaptureCheck)) return false;
  switch (then.origin) {
    case Origin::Leaf: {
      if (const auto* cast = then.cast._unsafe_get_target();
          cast != nullptr && known_storage_of(now) == cast)
        return seam::version_of(now) != then.cast_version;
      const at::Tensor* const leaf = leaf_behind(now);
      return leaf != nullptr && leaf->unsafeGetTensorImpl() == then.leaf._unsafe_get_target() &&
             (is_leaf_changed(then, *leaf) ||
              (then.shares_leaf && known_storage_of(now) != then.storage._unsafe_get_target()));
    }
    case Origin::Outside:
      return known_storage_of(now) != then.storage._unsafe_get_target() ||
             seam::version_of(now) != then.version || offset_of(now) != then.offset;
    case Origin::Input:  // the caller knows the arguments
      return then.storage._unsafe_get_target() != nullptr &&
             (known_storage_of(now) != then.storage._unsafe_get_target() ||
              seam::version_of(now) != then.version);
    case Origin::Inside:
      return then.storage._unsafe_get_target() != nullptr &&
             known_storage_of(now) == then.storage._unsafe_get_target() &&
             seam::version_of(now) != then.version;
    case Origin::NoStorage:
      return false;
  }
  return false;
}

}  // namespace remat
