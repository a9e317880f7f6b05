#pragma once
// Distinguishes tensors that a region made, was given, or captured from outside.
//
// Note [Captures]
// A parameter, buffer or captured tensor that changed between forward and recompute gives a wrong
// gradient (Rule 10). The kind of a saved tensor is decided when the function has returned:
//   Leaf     A leaf that requires grad, a view of one, or autocast's cast of one: followed by its
//            TensorImpl. If the recompute saves the same object, version and storage must be
//            unchanged; another object was made inside.
//   Outside  Any other saved tensor whose storage is alive when the function has returned and
//            belongs to no input and no result. If it is gone or replaced at the recompute, that
//            is a change too. A tensor with a history older than the region is Outside even if
//            it is gone: the function may have put another one into its place (a hidden state).
//   Inside   A tensor whose grad_fn was built in the region and that views nothing older. The
//            version must match only if the recompute saves the very same storage (a captured
//            tensor changed in place inside the region).
//   Input    A tensor that shares its storage with an input. Autograd's own check covers the
//            argument itself. The recompute's tensor must lie in an argument's storage or in
//            forward's (hooks may give back copies); a captured alias with a version counter of its
//            own must have forward's version.
// Storages are remembered weakly, since addresses alone may be reused. A sparse tensor is
// identified by the storage of its values. A view of a tensor of a Python class (a jagged one) may
// have an empty storage of its own: it is identified by the tensor that it views, as its parts are.

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <unordered_map>

#include "lib/seam/autograd_meta.h"

namespace remat {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

enum class Origin : uint8_t { Inside, Outside, Leaf, Input, NoStorage };

/// Data of one saved tensor for the capture check.
struct Provenance {
  WeakStorage storage{c10::intrusive_ptr<c10::StorageImpl>()};
  /// The leaf; for an Outside tensor, the tensor itself or the one that it views.
  WeakTensor leaf{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  /// The storage of a cast, which is its own. If the cast is saved again, its version counts;
  /// otherwise the leaf's.
  WeakStorage cast{c10::intrusive_ptr<c10::StorageImpl>()};
  uint32_t version = 0, cast_version = 0;
  /// The offset in its storage of the leaf, or the Outside tensor (low bits), which `set_data` may
  /// change.
  uint32_t offset = 0;
  bool shares_leaf = false;  ///< whether it lies in the leaf's storage, as a view does
  Origin origin = Origin::NoStorage;
};

/// Identifies a tensor for an error, which resolves its name when it is built.
struct TensorIdentity {
  /// The tensor, or the one that it views or of which it is autocast's cast.
  WeakTensor object{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  WeakStorage storage{c10::intrusive_ptr<c10::StorageImpl>()};

  static TensorIdentity of(const at::Tensor& tensor);
  static TensorIdentity of(const Provenance& provenance) {
    return {provenance.leaf, provenance.storage};
  }
};

/// Returns the storage of a tensor, or null if it has none.
inline c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}
WeakStorage weak_storage_of(const at::Tensor& tensor);

/// Returns the values of a sparse tensor (COO, or compressed); undefined for others.
at::Tensor sparse_values_of(const at::Tensor& tensor);

/// Returns a weak reference to the tensor. For a compressed sparse one, to its values: the tensor
/// itself releases them only with its last weak reference.
WeakTensor weak_object_of(const at::Tensor& tensor);
/// Returns the storage that identifies a tensor, see Note [Captures]; null if there is none.
WeakStorage weak_known_storage_of(const at::Tensor& tensor);
inline c10::StorageImpl* known_storage_of(const at::Tensor& tensor) {
  if (tensor.key_set().has(c10::DispatchKey::Python)) return storage_of(seam::viewed(tensor));
  if (c10::StorageImpl* const own = storage_of(tensor)) return own;
  const at::Tensor values = sparse_values_of(tensor);
  return values.defined() ? storage_of(values) : nullptr;
}

/// Returns the same storage, but null for a sparse tensor, which has none of its own.
inline c10::StorageImpl* memory_of(const at::Tensor& tensor) {
  return storage_of(tensor) == nullptr ? nullptr : known_storage_of(tensor);
}
inline WeakStorage weak_memory_of(const at::Tensor& tensor) {
  return storage_of(tensor) == nullptr ? weak_storage_of(tensor) : weak_known_storage_of(tensor);
}

/// The storages of a region's inputs, or of its result, held weakly.
class StorageSet {
 public:
  void add(const at::Tensor& tensor);
  bool contains(const c10::StorageImpl* storage) const { return number_of(storage) >= 0; }
  /// Returns the number of a storage, in the order of adding; -1 if it was not added.
  int64_t number_of(const c10::StorageImpl* storage) const;
  /// Returns the storage of a number; empty for -1, and after clear().
  WeakStorage weak_at(int64_t number) const;
  /// Returns the storage of a number, for comparison only; null for -1.
  const c10::StorageImpl* at(int64_t number) const {
    return number < 0 ? nullptr : storages_[static_cast<std::size_t>(number)]._unsafe_get_target();
  }
  void clear();
  bool is_empty() const { return storages_.empty(); }
  /// Visits the storages that are alive.
  template <class Visitor>
  void visit(Visitor&& visitor) const {
    for (const WeakStorage& each : storages_)
      if (const auto storage = each.lock()) visitor(*storage);
  }

 private:
  static constexpr std::size_t max_scanned = 8;
  c10::SmallVector<WeakStorage, 2> storages_;
  using Index = std::unordered_map<const c10::StorageImpl*, int64_t>;
  std::unique_ptr<Index> index_;  // their numbers; only in larger sets
};

/// The begin of a region's forward on its thread: nodes built there later have higher numbers.
struct RegionStart {
  uint64_t sequence = 0;
  uint64_t thread = 0;
  static RegionStart here();
};

/// Returns the leaf that a tensor is, views, or was cast from by autocast; or null. It lives as
/// long as the tensor.
const at::Tensor* leaf_behind(const at::Tensor& tensor);

/// Returns whether an operator made the tensor, which is not a view, since the region began, with a
/// node.
bool is_built_since(const RegionStart& start, const at::Tensor& tensor);

/// Returns whether an operator made the tensor, or the one that it views, before the region began,
/// and on its thread.
bool is_built_before(const RegionStart& start, const at::Tensor& tensor);

/// Returns whether a C++ autograd Function made the tensor.
bool is_made_by_function(const at::Tensor& tensor);

/// Returns the preliminary provenance of a tensor that is being saved. `inputs`: storages of the
/// region's inputs.
Provenance provenance_of(const at::Tensor& saved, const RegionStart& start,
                         const StorageSet& inputs);

/// Returns whether a changed capture is another tensor, not the same one changed in place.
bool is_replaced(const Provenance& then, const at::Tensor& now);

/// Returns whether the leaf that `then` follows has changed; false if it follows none.
bool is_leaf_changed(const Provenance& then);

/// Returns whether the tensor that a recompute saves in the place of `then` is a changed capture.
bool is_changed(const Provenance& then, const at::Tensor& now);

}  // namespace remat
