#pragma once
// Tells apart what a region made, what it was given, and what it captured from outside.
//
// Note [Captures]
// A parameter, buffer or captured tensor that changed between forward and recompute gives a wrong
// gradient (Rule 10). What counts, decided when the function has returned:
//   Leaf     a leaf that requires grad, a view of one, or autocast's cast of one: followed by its
//            TensorImpl. If the recompute saves the same object, version and storage must be as
//            they were; another object was made inside.
//   Outside  any other saved tensor whose storage is alive when the function has returned and
//            belongs to no input and no result. If it is gone or replaced at the recompute, that
//            is a change too. So is one with a history older than the region, whatever became of it: the
//            function has put another one into its place (a hidden state).
//   Inside   a tensor whose grad_fn was built in the region and that views nothing older. Only if
//            the recompute saves the very same storage (a captured tensor changed in place inside
//            the region) the version must match.
//   Input    shares its storage with an input. Autograd's own check covers the argument itself. What the
//            recompute saves in its place must lie in an argument's storage or in forward's (hooks may
//            give back copies); a captured alias with a version of its own must have forward's.
// Storages are remembered weakly: comparing addresses alone meets reused ones. A sparse tensor is
// known by the storage of its values. A view of a tensor whose class is Python's (a jagged one) may
// have a storage of its own, in which nothing lies: it is known by the tensor that it views, as its
// parts are.

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

/// What the capture check remembers of one saved tensor.
struct Provenance {
  WeakStorage storage{c10::intrusive_ptr<c10::StorageImpl>()};
  /// The leaf is followed by this; of an Outside tensor it is the tensor itself, or what it views.
  WeakTensor leaf{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  /// A cast has a storage of its own. Saved again, the cast counts; otherwise the leaf does.
  WeakStorage cast{c10::intrusive_ptr<c10::StorageImpl>()};
  uint32_t version = 0, cast_version = 0;
  /// Where in its storage the leaf, or the Outside tensor, begins (low bits): `set_data` may move
  /// that.
  uint32_t offset = 0;
  bool shares_leaf = false;  ///< it lies in the leaf's storage, as a view does
  Origin origin = Origin::NoStorage;
};

/// By what an error may find out, when it is built, which tensor one was.
struct TensorIdentity {
  /// The tensor, or what it views or is autocast's cast of.
  WeakTensor object{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  WeakStorage storage{c10::intrusive_ptr<c10::StorageImpl>()};

  static TensorIdentity of(const at::Tensor& tensor);
  static TensorIdentity of(const Provenance& provenance) {
    return {provenance.leaf, provenance.storage};
  }
};

/// The storage of a tensor, or null if it has none: kinds of tensors that have none leave it null.
inline c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}
WeakStorage weak_storage_of(const at::Tensor& tensor);

/// The values of a sparse tensor (COO, or compressed); undefined for others.
at::Tensor sparse_values_of(const at::Tensor& tensor);

/// The tensor, held weakly. For a compressed sparse one its values stand: it lets go of them with
/// its last weak reference only.
WeakTensor weak_object_of(const at::Tensor& tensor);
/// The storage by which a tensor is known again, see Note [Captures]; null if there is none.
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

/// A region's inputs, or its result, have these storages; they are held weakly.
class StorageSet {
 public:
  void add(const at::Tensor& tensor);
  bool contains(const c10::StorageImpl* storage) const { return number_of(storage) >= 0; }
  /// Storages are numbered in the order in which they were added; -1 if it was not.
  int64_t number_of(const c10::StorageImpl* storage) const;
  /// The storage of a number; empty for -1, and if they were cleared.
  WeakStorage weak_at(int64_t number) const;
  /// Returns the storage of a number, only to be compared; null for -1.
  const c10::StorageImpl* at(int64_t number) const {
    return number < 0 ? nullptr : storages_[static_cast<std::size_t>(number)]._unsafe_get_target();
  }
  void clear();
  bool is_empty() const { return storages_.empty(); }
  /// Visits those that are alive.
  template <class Visitor>
  void visit(Visitor&& visitor) const {
    for (const WeakStorage& each : storages_)
      if (const auto storage = each.lock()) visitor(*storage);
  }

 private:
  static constexpr std::size_t max_scanned = 8;
  c10::SmallVector<WeakStorage, 2> storages_;
  using Index = std::unordered_map<const c10::StorageImpl*, int64_t>;
  std::unique_ptr<Index> index_;  // their numbers; only of larger sets
};

/// A region's forward began here on its thread: nodes built there later carry higher numbers.
struct RegionStart {
  uint64_t sequence = 0;
  uint64_t thread = 0;
  static RegionStart here();
};

/// The leaf that a tensor is, views, or was cast from by autocast; or null. It lives as long as the
/// tensor.
const at::Tensor* leaf_behind(const at::Tensor& tensor);

/// Whether an operator made the tensor, which is no view, since the region began, and autograd
/// knows it.
bool is_built_since(const RegionStart& start, const at::Tensor& tensor);

/// Whether an operator made the tensor, or what it views, before the region began, and on its
/// thread.
bool is_built_before(const RegionStart& start, const at::Tensor& tensor);

/// Whether a C++ autograd Function made the tensor.
bool is_made_by_function(const at::Tensor& tensor);

/// A first guess, made when the tensor is saved. `inputs`: storages of the region's inputs.
Provenance provenance_of(const at::Tensor& saved, const RegionStart& start,
                         const StorageSet& inputs);

/// Whether a changed capture is another tensor, not the same one changed in place.
bool is_replaced(const Provenance& then, const at::Tensor& now);

/// Whether the leaf that `then` follows has changed; false if it follows none.
bool is_leaf_changed(const Provenance& then);

/// Whether the tensor that a recompute saves in the place of `then` is a changed capture.
bool is_changed(const Provenance& then, const at::Tensor& now);

}  // namespace remat
