#pragma once
// One tensor that a region keeps for its recomputes: as it is, through hooks, on the CPU, or as a
// placeholder.

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

/// Where a kept tensor waits.
enum class KeptWhere {
  InPlace,
  OnCpuIfPossible,
  OnCpu  ///< or an error
};

class HostTwin;        // lib/selective/host_twin.h
class KeptMoves;       // lib/selective/kept_moves.h
class Piece;           // hooks/depot/piece.h
class SavedElsewhere;  // hooks/depot/depot.h

/// ... and how it gets there.
struct KeptPlace {
  KeptWhere where = KeptWhere::InPlace;
  KeptMoves* moves = nullptr;  ///< null: it stays
  bool is_beside = false;      ///< see KeptMoves::move; else the device's next work waits for it
  std::function<void()> on_late_move{};  ///< of one that stays for now; or empty
};

/// Note [Kept values]
/// What is kept is the original without its history: its storage, what it is beside that, and its
/// version counter, so that a change in place is seen. Inside another region it is saved as a
/// region's input is: through the hooks of that region, whose forward drops it (Rule 2); through
/// other hooks on request.
///
/// What shall wait on the CPU and lies in memory without gaps goes to a
/// depot: Note [Moving kept results]. The hooks get its twin: Note [Twins]. One that stays for now,
/// since it is among the last, counts as a copy all the same; but who writes to it is noticed for
/// as long as it lives. A copy that fails leaves it where it is, or is an error if it must move;
/// nothing else changes.
///
/// A result that autograd never saved and no operator of a recompute will read is not worth its
/// memory. Such a tensor becomes a placeholder: shape without data. Who reads the data of a
/// placeholder all the same (past the dispatcher, say) meets an error, upon which the recompute is
/// done once more with the operator run for real (Replay).
class KeptTensor {
 public:
  KeptTensor() = default;
  /// Throws what the hooks around throw, and CheckpointError if it must be on the CPU and cannot.
  KeptTensor(const at::Tensor& value, const detail::Scope& region, detail::HooksAround hooks,
             const KeptPlace& place);

  bool is_placeholder() const { return is_placeholder_; }
  bool is_elsewhere() const { return is_copy_ || is_behind_hooks(); }
  bool is_behind_hooks() const { return saved_ != nullptr && saved_->has_hooks(); }
  /// Whether it was changed in place since, by an alias that shares the version counter.
  bool is_changed() const;
  bool shares_version_with(const at::Tensor& tensor) const;
  /// [bytes] that it keeps; 0 for a placeholder.
  int64_t num_bytes() const { return is_placeholder() ? 0 : num_bytes_; }
  /// Of the original.
  c10::Device device() const { return device_; }
  bool is_on_cpu_instead() const { return is_copy_; }
  /// Of these: it may have stayed, and is moved later.
  bool is_among_last() const { return late_ != nullptr; }
  bool could_not_move() const { return could_not_move_; }
  /// What one restore brought back from the CPU, beside the work.
  struct Load {
    int64_t bytes = 0;
    bool was_begun = false;  ///< before it was asked for
  };
  /// The value, or the placeholder; may make the region around recompute.
  at::Tensor restore(std::optional<Load>* load = nullptr) const;
  /// The first part of it, where that may make the region around recompute: what the hooks give
  /// back.
  at::Tensor fetch() const { return saved_->unpack(); }
  /// The second part.
  at::Tensor restore(const at::Tensor& fetched, std::optional<Load>* load) const;
  /// Returns the storage of the original, or null. Only to be compared.
  const c10::StorageImpl* storage() const { return storage_; }

  /// For an error about it.
  TensorIdentity identity() const;

  /// What holds the data.
  struct Holders {
    c10::Storage storage;
    at::Tensor tensor;
    std::unique_ptr<torch::autograd::SavedVariable> saved;
    std::shared_ptr<Piece> moved;
    std::shared_ptr<SavedElsewhere> late;
  };
  /// The forward is over. Gives out what holds data that will not be read, if a placeholder can
  /// stand for it.
  std::optional<Holders> settle(bool will_be_read);
  /// The same of all that is kept, after that.
  struct Unfinished {
    std::shared_ptr<Piece> piece;  ///< null: nothing is to be done
    bool
        is_written_to;  ///< or may be, since somebody has the original: its store is to be finished
  };
  Unfinished end_forward();
  static bool is_placeholder(const at::Tensor& tensor);
  /// Whether the device's memory is spared by a copy on the CPU.
  static bool can_be_moved(const at::Tensor& value);
  /// Whether one could stand for it.
  static bool can_be_placeholder(const at::Tensor& tensor);
  /// Whether an error says that the data of a placeholder were asked for.
  static bool is_placeholder_error(const std::exception& error);

 private:
  /// What a tensor is beside its data.
  struct Metadata {
    c10::DispatchKeySet keys;
    caffe2::TypeMeta dtype;
    c10::impl::SizesAndStrides layout;
    int64_t offset = 0;
  };
  at::Tensor build(c10::Storage storage, int64_t offset) const;
  void move(const at::Tensor& value, const detail::Scope& region, detail::HooksAround hooks,
            const KeptPlace& place);
  bool move_plain(const at::Tensor& value, const detail::Scope& region, detail::HooksAround hooks,
                  const KeptPlace& place);
  void save(const at::Tensor& value, const detail::Scope& region, detail::HooksAround hooks);
  void note_version(const at::Tensor& value);
  at::Tensor moved_back(const at::Tensor& copy, std::optional<Load>* load) const;

  // One of five, unless it is a placeholder. An alias costs more than its parts, which most can be
  // taken into and built of again.
  c10::Storage data_;
  at::Tensor tensor_;  ///< inference and sparse tensors, copies, ...
  std::unique_ptr<torch::autograd::SavedVariable> saved_;  ///< where it may meet hooks
  std::shared_ptr<Piece> moved_;                           ///< all of its memory, on the CPU
  std::shared_ptr<SavedElsewhere> late_;                   ///< the same, or it has stayed so far
  std::weak_ptr<HostTwin> twin_;                           ///< what the hooks got of that
  std::optional<Metadata> metadata_;  ///< unless it cannot be built of its parts
  c10::VariableVersion counter_{c10::VariableVersion::DISABLED};
  uint32_t version_ = 0;
  c10::Device device_ = c10::kCPU;  ///< of the original
  const c10::StorageImpl* storage_ = nullptr;
  int64_t num_bytes_ = 0;
  std::size_t storage_bytes_ = 0;  ///< of the original
  bool is_defined_ = false, is_placeholder_ = false, is_copy_ = false, could_not_move_ = false;
  bool has_to_move_ = false;
  bool was_changed_ = false;  ///< by the forward's end, while it was copied
};

}  // namespace remat
