#pragma once
// The tensor arguments of a region, saved as autograd saves a tensor.

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "lib/frame/held_input.h"
#include "lib/frame/region.h"
#include "lib/seam/autograd_meta.h"
#include "lib/tensor/capture.h"
#include "lib/tensor/graph_walk.h"

namespace remat {

class SlotFiller;  // hooks/pack/slot.h

/// Thrown if an argument carries a forward-mode tangent.
struct CarriesTangent {};

/// The arguments of one recompute.
struct GivenInputs {
  std::vector<at::Tensor> tensors;
  /// A tensor that hooks returned and still hold: the recompute must not write to it.
  struct Held {
    std::size_t input;
    c10::VariableVersion counter;
    uint32_t version;
  };
  c10::SmallVector<Held, 0> held{};
};

/// Note [Inputs without history]
/// A region's input is saved through the hooks that are active around the region: under a parent
/// frame it becomes a slot of the parent (Rule 2). A tensor that requires grad is saved as an alias
/// without its history, so that a frame never keeps the graph above it alive. The data needed to
/// rebuild its role are held beside it. A tensor that does not require grad is the same object in
/// every run. One tensor passed twice is one tensor in the recompute too.
///
/// Note [Leaves as they are]
/// A leaf that requires grad is handed to a recompute as the same object, if it still has the data
/// and the role of forward: the function may read its `grad`, compare it with a captured one, or
/// look it up. The function's backwards do not accumulate into it again: Note [Accumulating once].
/// The recompute gets an alias instead in three cases: such a backward could run hooks on the leaf;
/// the function writes to an argument; or hooks around the region gave back other values.
///
/// Note [Functions that write to arguments]
/// Without hooks around the region, a recompute of a function that writes to its own argument is
/// refused. LibTorch refuses in the same way to unpack a tensor whose version has changed. Hooks
/// may hold a copy, and a recompute that wrote to the tensor they return would change it for the
/// next one. So the storages that forward wrote to are noted. A recompute then gets copies of all
/// arguments that came from hooks (one argument may be set to the storage of another). Views of one
/// storage get one copy.
///
/// Note [Inputs that are copies]
/// With InputMode::CopyOnWrite a copy of the argument is saved, lazy if possible
/// (lib/seam/lazy_copy.h), and hooks and regions around receive that copy. Each recompute gets a
/// copy of that copy: versions do not show each write (`data_ptr`, `.data()`), so they cannot tell
/// whether forward wrote to an argument. The recompute's copy is lazy if the first one was and
/// LibTorch was not asked for a mutable pointer to the argument before the function returned.
/// Otherwise it is made at once: a lazy copy gets other memory when it is written, and a read-only
/// pointer that the function holds would not follow.
///
/// A lazy copy does not detect a write that bypasses LibTorch's mutable pointers. A copy is not
/// trusted if its argument's version has changed, the two still share memory, and the argument's
/// layout is unchanged (`squeeze_` and `t_` change it, and write nothing).
class Inputs {
 public:
  /// Takes the tensors out of the body's kept arguments and saves them, as the region's options
  /// say. Returns the filler of a recompute around that this completed, which is to be stopped, or
  /// null. Throws errors of the hooks around, and LibTorch's error for inference tensors.
  SlotFiller* save(const Region& region);
  /// Returns fresh arguments for one recompute; `runs_backward`: whether forward's function did.
  /// May make parents recompute. Throws CheckpointError in these cases: an input was changed in
  /// place or given other data; a user's hooks held the input itself, which changed; or hooks
  /// separated inputs that shared memory and are written to.
  GivenInputs unpack(const Region& region, bool runs_backward) const;
  /// Throws CheckpointError if the ended recompute wrote to tensors that hooks hold, which forward
  /// did not do.
  void check_unwritten(const Region& region, const GivenInputs& given) const;
  /// Note [Ahead of forward]
  /// A recompute that forward itself waits for ends where forward waits. It cannot end there if
  /// forward waits for another thread's backward, or if the function cannot be stopped. It then
  /// runs code that forward will run next, and writes of that code happen twice. Forward has not
  /// written to its arguments so far, since otherwise a recompute without copies of them would have
  /// been refused.
  using Versions = std::vector<uint32_t>;
  /// Returns the versions of forward's own arguments while it runs; otherwise an empty list.
  Versions versions_in_forward() const;
  /// Throws CheckpointError if the versions have changed since `before`.
  void check_not_ahead(const Region& region, const Versions& before) const;
  /// Notes that a batch norm moved running statistics with this storage, which LibTorch's version
  /// does not show. Returns whether they are an argument: it then counts as written, unless the
  /// region ignores buffers.
  bool note_statistics(const Region& region, const c10::StorageImpl* statistics);

  void clear() { saved_.clear(); }

  /// Returns the storages of the inputs. Empty after the function has returned, if no input is
  /// compared any more.
  const StorageSet& storages() const { return storages_; }
  /// Returns the number of an input's storage: equal for inputs that share theirs, -1 for none.
  int64_t storage_number(std::size_t input) const { return saved_[input].storage_number; }
  /// Visits, for each input, the place of its gradient in forward (nowhere if that is gone), and
  /// whether it had hooks.
  template <class Visitor>
  void visit_edges(Visitor&& visitor) const {
    for (const Input& each : saved_) visitor(each.edge.get(), each.has_tensor_hooks);
  }
  /// Returns whether inputs that have the storage are held on the CPU.
  bool is_offloaded(const c10::StorageImpl& storage) const {
    const int64_t number = storages_.number_of(&storage);
    return std::any_of(saved_.begin(), saved_.end(), [&](const Input& each) {
      return each.held.is_offloaded() && each.storage_number == number;
    });
  }
  /// Returns whether the region itself holds an input that has the storage, as the same tensor.
  bool is_in_place(const c10::StorageImpl& storage) const {
    const int64_t number = storages_.number_of(&storage);
    return number >= 0 && std::any_of(saved_.begin(), saved_.end(), [&](const Input& each) {
             return each.storage_number == number && each.is_in_place();
           });
  }
  /// Returns whether unpacking the inputs detects a change of the storage's contents: an input has
  /// the storage, and no such input was copied or taken by a user's hooks.
  bool watches(const c10::StorageImpl* storage) const {
    const int64_t number = storages_.number_of(storage);
    if (number < 0 || unwatched_ == nullptr) return number >= 0;
    const auto at = static_cast<std::size_t>(number);
    return at >= unwatched_->size() || !(*unwatched_)[at];
  }
  bool has_leaf() const {
    return std::any_of(saved_.begin(), saved_.end(),
                       [](const Input& each) { return each.role == GradRole::Leaf; });
  }
  /// Visits each leaf that requires grad and is alive.
  template <class Visitor>
  void visit_leaves(Visitor&& visitor) const {
    for (const Input& each : saved_)
      if (const at::Tensor leaf = each.edge.leaf(); leaf.defined()) visitor(leaf);
  }
  /// Notes the inputs that the region's function wrote to; call it when the function has returned.
  /// Returns the inputs that no recompute can use: a tensor that the function wrote to may have the
  /// region's graph as its history now, and would keep it alive.
  std::vector<HeldInput> settle();

 private:
  /// An input that a user's hooks took. LibTorch does not check its version when it comes from
  /// there. They may hold a copy, which a change of the original does not affect, or the original.
  struct Watched {
    WeakStorage storage;
    WeakTensor object;
    c10::VariableVersion counter;
    std::atomic<uint32_t> version;        ///< hooks may write when they return it
    std::atomic<bool> is_spoiled{false};  ///< a recompute wrote to the hooks' tensor
    explicit Watched(const at::Tensor& given);
  };
  /// See Note [Inputs that are copies].
  struct Copy {
    WeakTensor original;
    WeakStorage storage;      ///< the copy's
    const void* shared_data;  ///< the address of the argument's memory if that is the copy's, too
    bool is_lazy = false;     ///< and no mutable pointer to the argument was requested
    /// Returns whether it has no memory of its own yet.
    bool shares_memory() const;
  };
  struct Input {
    Input() = default;
    explicit Input(HeldInput kept) : held(std::move(kept)) {}
    HeldInput held;
    std::unique_ptr<Watched> watched;
    std::unique_ptr<Copy> copy;
    std::unique_ptr<seam::Beside> beside;  ///< properties of a result beside its values
    WeakEdge edge;
    c10::VariableVersion counter{
        c10::VariableVersion::DISABLED};  ///< for hooks' tensors, until the function has returned
    uint32_t version = 0;
    uint32_t layout = 0;  ///< for a tensor that may be the same object in every run
    int32_t storage_number = -1;
    int32_t same_as = -1;  ///< the earlier input that is the same tensor, or -1
    /// The role of forward's tensor; if that requires grad, each run gets an alias.
    GradRole role = GradRole::None;
    bool has_tensor_hooks = false;
    bool is_view = false;
    bool is_moved = false;    ///< running statistics: see note_statistics()
    bool is_written = false;  ///< by forward, maybe through a shared storage
    bool is_lost = false;     ///< written, and its old contents are lost

    bool is_object() const { return role == GradRole::None || role == GradRole::NoGradViewOfLeaf; }
    /// Returns whether the tensor itself is held, here or where we moved it, so that its version is
    /// compared.
    bool is_held() const { return copy == nullptr && (!held.has_hooks() || held.is_offloaded()); }
    /// Returns whether the region itself holds the tensor.
    bool is_in_place() const { return copy == nullptr && !held.has_hooks(); }
    bool has_moved() const { return counter.enabled() && counter.current_version() != version; }
    bool is_freed(const at::Tensor& data) const;
    bool is_copy_stale(const at::Tensor& data) const;
    bool is_unchanged(const at::Tensor& leaf, const at::Tensor& data) const;
    at::Tensor in_role(at::Tensor data, bool is_any_written, bool runs_backward) const;
  };
  bool is_written(const Input& input) const;
  bool is_any_written() const;
  void note_written();
  bool is_any_parted(const std::vector<at::Tensor>& given) const;
  TensorIdentity identity_of(const Input& input) const;
  at::Tensor unpack(const Region& region, const Input& input, std::size_t number) const;
  std::vector<bool> copy(const Region& region, std::vector<at::Tensor>& tensors,
                         bool is_any_written) const;

  c10::SmallVector<Input, 1> saved_;
  StorageSet storages_;
  /// Per storage number, while the function runs: whether an input with this storage was copied or
  /// taken by a user's hooks. Null if no input was.
  std::unique_ptr<std::vector<bool>> unwatched_;
  bool is_settled_ = false;
};

}  // namespace remat
