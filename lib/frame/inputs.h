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

/// One recompute is given these arguments.
struct GivenInputs {
  std::vector<at::Tensor> tensors;
  /// What hooks gave, and hold: the recompute is not to write to it.
  struct Held {
    std::size_t input;
    c10::VariableVersion counter;
    uint32_t version;
  };
  c10::SmallVector<Held, 0> held{};
};

/// Note [Inputs without history]
/// A region's input is saved through whatever hooks are active around the region: under a parent
/// frame it becomes a slot of the parent (Rule 2). A tensor that requires grad is saved as an alias
/// without its history, so that a frame never keeps the graph above it alive; what is needed to
/// rebuild its role is kept beside it. A tensor that does not require grad is the same object in
/// every run. One tensor passed twice is one tensor in the recompute too.
///
/// Note [Leaves as they are]
/// A leaf that requires grad is handed to a recompute as the object that it is, if it still has the
/// data and the role of forward: the function may ask it for its `grad`, compare it with a captured
/// one, or look it up. The function's backwards do not accumulate into it
/// again: Note [Accumulating once]. If they could meet hooks on it, if the function writes to an
/// argument, or hooks around the region gave back other values, it is an alias.
///
/// Note [Functions that write to arguments]
/// Without hooks around the region a recompute of a function that writes to its own argument is
/// refused, as LibTorch refuses to unpack a tensor whose version has moved. Hooks may have kept a
/// copy, and a recompute that wrote to what they give back would leave it changed for the next. So
/// what forward wrote to is noted, by storage, and a recompute then gets copies of all that came
/// from hooks (one argument may be set to the storage of another), views of one storage in one.
///
/// Note [Inputs that are copies]
/// With InputMode::CopyOnWrite what is saved is a copy of the argument, lazy if it can be
/// (lib/seam/lazy_copy.h), and hooks and regions around get that. Each recompute is handed a copy
/// of that copy: versions do not show each write (`data_ptr`, `.data()`), so whether forward wrote
/// to an argument cannot decide. The recompute's copy is lazy if the first one was, and LibTorch
/// was asked for no mutable pointer to the argument before the function returned. Else it is made
/// at once: a lazy copy moves when it is written, and a pointer for reading that the function has
/// would stay behind. A lazy copy does not see a write past LibTorch's mutable pointers. If an
/// argument's version has moved, its copy shares its memory all the same, and it still looks as it
/// did (which it would not after `squeeze_` or `t_`, which write nothing), the copy is not trusted.
class Inputs {
 public:
  /// Takes the tensors out of the body's kept arguments and saves them, as the region's options
  /// say. Throws what the hooks around throw, and LibTorch's error for inference tensors. If that
  /// was the last that a recompute around had to do, returns its filler, which is to be stopped;
  /// else null.
  SlotFiller* save(const Region& region);
  /// Fresh arguments for one recompute; `runs_backward`: forward's function did. May make parents
  /// recompute. Throws CheckpointError if an input was changed in place or given other data, if a
  /// user's hooks kept it as it was, or if they took apart what shared memory and is written to.
  GivenInputs unpack(const Region& region, bool runs_backward) const;
  /// The recompute has ended. Throws CheckpointError if it wrote to what hooks hold, which forward
  /// did not.
  void check_unwritten(const Region& region, const GivenInputs& given) const;
  /// Note [Ahead of forward]
  /// A recompute that forward itself waits for ends where forward waits. It cannot if that is for
  /// another thread's backward, or if the function cannot be stopped: then it does what forward
  /// will do next, and what it writes to is written twice. Forward has not written to its arguments
  /// so far, or there were no recompute without copies of them.
  using Versions = std::vector<uint32_t>;
  /// Those of forward's own arguments, while it runs; else none.
  Versions versions_in_forward() const;
  /// Throws CheckpointError if they have moved since.
  void check_not_ahead(const Region& region, const Versions& before) const;
  /// A batch norm moved running statistics that have the storage; LibTorch's version does not show
  /// that. Returns whether they are an argument: then they count as written, unless the region
  /// ignores buffers.
  bool note_statistics(const Region& region, const c10::StorageImpl* statistics);
  /// The tensors die here.
  void clear() { saved_.clear(); }

  /// Empty when the function has returned, where nothing is compared any more.
  const StorageSet& storages() const { return storages_; }
  /// Which of the inputs' storages one has: equal for inputs that share theirs, -1 for none.
  int64_t storage_number(std::size_t input) const { return saved_[input].storage_number; }
  /// Visits, for each input, where its gradient goes in forward (nowhere, if it is gone), and
  /// whether it had hooks.
  template <class Visitor>
  void visit_edges(Visitor&& visitor) const {
    for (const Input& each : saved_) visitor(each.edge.get(), each.has_tensor_hooks);
  }
  /// Whether the inputs that have the storage wait on the CPU.
  bool is_offloaded(const c10::StorageImpl& storage) const {
    const int64_t number = storages_.number_of(&storage);
    return std::any_of(saved_.begin(), saved_.end(), [&](const Input& each) {
      return each.is_offloaded && each.storage_number == number;
    });
  }
  /// Whether an input that has the storage is kept as it is, by the region itself.
  bool is_in_place(const c10::StorageImpl& storage) const {
    const int64_t number = storages_.number_of(&storage);
    return number >= 0 && std::any_of(saved_.begin(), saved_.end(), [&](const Input& each) {
             return each.storage_number == number && !each.held.has_hooks() && !each.is_copy();
           });
  }
  /// Whether a change of what has the storage is found when the inputs are unpacked: an input has
  /// it, and none of which there is a copy.
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
  /// Each leaf that requires grad and is alive.
  template <class Visitor>
  void visit_leaves(Visitor&& visitor) const {
    for (const Input& each : saved_)
      if (const at::Tensor leaf = each.edge.leaf(); leaf.defined()) visitor(leaf);
  }
  /// The region's function has returned: notes what it wrote to. Gives out what no recompute can
  /// use: a tensor that the function wrote to may have its graph as a history now, and would keep
  /// it alive.
  std::vector<HeldInput> settle();

 private:
  /// What only some inputs have.
  struct Details {
    /// LibTorch does not look at the version of what comes from a user's hooks. They may have kept
    /// a copy, which a change of the original leaves alone, or the original.
    bool is_watched = false;
    WeakStorage storage{c10::intrusive_ptr<c10::StorageImpl>()};
    WeakTensor object{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
    c10::VariableVersion counter{c10::VariableVersion::DISABLED};
    std::atomic<uint32_t> version{0};     ///< the hooks themselves may write when they give it back
    std::atomic<bool> is_spoiled{false};  ///< a recompute wrote to what they hold
    /// See Note [Inputs that are copies]. Of one: the argument, where its memory was, and the
    /// copy's storage.
    bool is_copy = false;
    WeakTensor original{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
    const void* shared_data = nullptr;
    WeakStorage copy{c10::intrusive_ptr<c10::StorageImpl>()};
    bool is_lazy = false;  ///< and the function did not ask for a mutable pointer to the argument
    /// What a result has beside its values.
    seam::Beside beside{};
  };
  struct Input {
    Input() = default;
    explicit Input(HeldInput kept) : held(std::move(kept)) {}
    HeldInput held;
    std::unique_ptr<Details> details;
    WeakEdge edge;
    c10::VariableVersion counter{
        c10::VariableVersion::DISABLED};  ///< of what hooks hold, until the function has returned
    uint32_t version = 0;
    uint32_t layout = 0;  ///< of one that may be the same object in every run
    int32_t storage_number = -1;
    int32_t same_as : 24 = -1;  ///< the input that is the same tensor, or -1
    GradRole role : 2 =
        GradRole::None;  ///< of forward's; what requires grad is an alias in each run
    bool has_tensor_hooks : 1 = false;
    bool is_view : 1 = false;
    bool is_offloaded : 1 = false;  ///< by the option: hooks of ours hold it
    bool is_lost : 1 = false;       ///< written, and nobody holds what it was
    bool is_moved : 1 = false;      ///< running statistics: see note_statistics()
    bool is_written : 1 = false;  ///< by the function, in forward; also one that shares its storage
    Details& make_details() {
      if (details == nullptr) details = std::make_unique<Details>();
      return *details;
    }
    /// Returns null unless a user's hooks took the input.
    Details* watched() const {
      return details != nullptr && details->is_watched ? details.get() : nullptr;
    }
    bool is_copy() const { return details != nullptr && details->is_copy; }
    bool is_object() const { return role == GradRole::None || role == GradRole::NoGradViewOfLeaf; }
  };
  bool is_held(const Input& input) const;
  static bool is_freed(const Input& input, const at::Tensor& data);
  bool has_moved(const Input& input) const;
  bool is_written(const Input& input) const;
  bool is_any_written() const;
  void note_written();
  bool is_any_parted(const std::vector<at::Tensor>& given) const;
  TensorIdentity identity_of(const Input& input) const;
  static bool shares_memory(const Details& copy);
  bool is_copy_stale(const Input& input, const at::Tensor& data) const;
  at::Tensor unpack(const Region& region, const Input& input, std::size_t number) const;
  std::vector<bool> copy(const Region& region, std::vector<at::Tensor>& tensors,
                         bool is_any_written) const;
  static bool is_unchanged(const Input& input, const at::Tensor& leaf, const at::Tensor& data);
  at::Tensor in_role(const Input& input, at::Tensor data, bool is_any_written,
                     bool runs_backward) const;

  c10::SmallVector<Input, 1> saved_;
  StorageSet storages_;
  /// While the function runs, by number of the storage: whether an input with this storage was
  /// copied, or was taken by a user's hooks. Null if no input was.
  std::unique_ptr<std::vector<bool>> unwatched_;
  bool is_settled_ = false;
};

}  // namespace remat
