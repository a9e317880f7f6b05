#pragma once
// One tensor that a region keeps for its recomputes: in place, through hooks, or on the CPU.

#include <ATen/core/Tensor.h>
#include <c10/core/impl/SizesAndStrides.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "lib/scope/hook_stack.h"
#include "lib/tensor/capture.h"

namespace remat {

/// The location of a kept tensor.
enum class KeptWhere {
  InPlace,
  OnCpuIfPossible,
  OnCpu  ///< if the tensor cannot move, that is an error
};

class KeptMoves;       // lib/selective/kept_moves.h
class Piece;           // hooks/depot/piece.h
class SavedElsewhere;  // hooks/depot/depot.h

/// The location of a kept tensor, with the way to it.
struct KeptPlace {
  KeptWhere where = KeptWhere::InPlace;
  KeptMoves* moves = nullptr;  ///< null: the tensor stays
  /// See KeptMoves::move; if false, the device's next work waits for the copy.
  bool is_beside = false;
  std::function<void()> on_late_move{};  ///< called when a tensor that stayed moves; may be empty
};

/// Note [Kept values]
/// A kept value is the original without its history: its storage, its metadata, and its version
/// counter, which reveals a change in place. Inside another region it is saved like a region's
/// input: through the hooks of that region, whose forward drops it (Rule 2). It is saved through
/// other hooks on request.
///
/// A value for the CPU whose memory has no gaps goes to a depot: Note [Moving kept results]. A
/// value that stays for now, since it is among the last, also counts as a copy; but a write to it
/// is noticed as long as it lives. A failed copy leaves the value in place, or is an error if it
/// must move. Hooks get a copy that the program has waited for, and loading that copy is waited
/// for, too. There a failed copy is an error: an enclosing region expects the value on one device
/// in each run.
class KeptTensor {
 public:
  KeptTensor() = default;
  /// Keeps a value. Throws the errors of enclosing hooks, and CheckpointError if the value must
  /// move to the CPU and cannot.
  KeptTensor(const at::Tensor& value, const detail::Scope& region, detail::HooksAround hooks,
             const KeptPlace& place);

  bool is_elsewhere() const { return is_copy_ || is_behind_hooks(); }
  bool is_behind_hooks() const { return saved_ != nullptr && saved_->has_hooks(); }
  /// Returns whether the value was changed in place since, by an alias that shares the version
  /// counter.
  bool is_changed() const;
  bool shares_version_with(const at::Tensor& tensor) const;
  /// Takes changes so far for none.
  void accept_version() {
    if (counter_.enabled()) version_ = counter_.current_version();
  }
  /// Returns the bytes that it keeps.
  int64_t num_bytes() const { return num_bytes_; }
  /// Returns the device of the original.
  c10::Device device() const { return device_; }
  bool is_on_cpu_instead() const { return is_copy_; }
  /// Returns whether it counts as a copy but may still be in place, and moves later.
  bool is_among_last() const { return late_ != nullptr; }
  bool could_not_move() const { return could_not_move_; }
  /// The load of one restore from the CPU, for recorders.
  struct Load {
    int64_t bytes = 0;
    bool was_begun = false;  ///< whether the load began before the restore
  };
  /// Returns the value. May make the enclosing region recompute.
  at::Tensor restore(std::optional<Load>* load = nullptr) const;
  /// Returns the tensor from the hooks: the first part of `restore`, which may make the enclosing
  /// region recompute.
  at::Tensor fetch() const { return saved_->unpack(); }
  /// Returns the value for a fetched tensor: the second part of `restore`.
  at::Tensor restore(const at::Tensor& fetched, std::optional<Load>* load) const;
  /// Returns the storage of the original, or null; for comparisons only.
  const c10::StorageImpl* storage() const { return storage_; }

  /// Returns the identity of the tensor, for an error about it.
  TensorIdentity identity() const;

  /// A store that is unfinished at the end of the forward.
  struct Unfinished {
    std::shared_ptr<Piece> piece;  ///< null: no work is left
    /// True if the original has an owner, who may write to it: its store must be finished.
    bool is_written_to;
  };
  Unfinished end_forward();
  /// Returns whether a copy on the CPU would free memory of the device.
  static bool can_be_moved(const at::Tensor& value);
  /// Returns whether storage, sizes and keys describe a tensor completely.
  static bool can_be_taken_apart(const at::Tensor& value);

 private:
  /// A tensor's metadata: all but its data.
  struct Metadata {
    c10::DispatchKeySet keys;
    caffe2::TypeMeta dtype;
    c10::impl::SizesAndStrides layout;
    int64_t offset = 0;
  };
  at::Tensor build(c10::Storage storage, int64_t offset) const;
  void move(const at::Tensor& value, bool meets_hooks, const KeptPlace& place);
  bool move_to_depot(const at::Tensor& value, const KeptPlace& place);
  void note_version(const at::Tensor& value);
  at::Tensor moved_back(const at::Tensor& copy, std::optional<Load>* load) const;

  // One of these five is set. An alias costs more than its parts, into which most tensors can be
  // divided, and from which they can be rebuilt.
  c10::Storage data_;
  at::Tensor tensor_;  ///< inference and sparse tensors, copies, ...
  std::unique_ptr<torch::autograd::SavedVariable> saved_;  ///< if hooks may apply
  std::shared_ptr<Piece> moved_;                           ///< its whole memory, on the CPU
  std::shared_ptr<SavedElsewhere> late_;                   ///< like `moved_`, or still in place
  std::optional<Metadata> metadata_;  ///< empty if it cannot be rebuilt from its parts
  c10::VariableVersion counter_{c10::VariableVersion::DISABLED};
  uint32_t version_ = 0;
  c10::Device device_ = c10::kCPU;  ///< of the original
  const c10::StorageImpl* storage_ = nullptr;
  int64_t num_bytes_ = 0;
  bool is_defined_ = false, is_copy_ = false, could_not_move_ = false;
  bool has_to_move_ = false;
  bool was_changed_ = false;  ///< before the forward's end, during the copy
};

}  // namespace remat
