#pragma once
// The depot of one guard: moves saved tensors to a place, in pieces that saved tensors share.
//
// Note [What is moved]
// A tensor moves if it is plain, strided, has data, is large enough, and if the place takes it. A
// parameter (a leaf that requires grad, or a view of one) does not move. The piece of its storage
// that moves:
//   the whole storage   if the tensor has at least a quarter of it (or it is small): then every
//                       view shares one piece, and is restored with its offset;
//   its own range       otherwise, if at most three quarters of the range are gaps: the tensor is
//                       restored at offset 0.
// Any other tensor stays: moving the large range of a thin slice would cost more than it frees. The
// bytes of a range are copied unchanged, so that overlapping and expanded views are restored
// exactly.
//
// Note [When contents are copied]
// Generated code saves an argument before the kernel writes it (the noise of rrelu). Such a buffer
// takes no part in differentiation, and therefore does not require grad. A tensor that requires
// grad is copied when it is saved. Any other tensor stays until its operator is over: until this
// thread saves for another operator (operators that save have a node, and nodes are numbered), or
// the guard ends. If it was changed in place by then, it is not copied, and stays.
//
// A tensor that stays is kept with its version. Reading it after a change in place raises an error
// as plain autograd does, since LibTorch checks no version where there are hooks. A copied tensor
// keeps the values of the save, unless the copy may run later than it was requested
// (StoredContents::is_stored_late): then a change raises an error too.
//
// Note [Sharing pieces]
// Two saved tensors share a piece if they have the same storage object, alive all the time, the
// same version counter and version, and equal contents. (A write through `.data` does not change
// the version.) Contents on the CPU are compared only when a second save needs them. A
// ComparablePlace compares byte by byte with its copy; for other places the contents are hashed
// before each copy, in 64 bits. Most tensors are saved once, and are then read only by the copy.
// A tensor that moves for lack of room has no owner outside of the depot. Saved tensors of one
// storage that move at once therefore share a piece without a comparison. Contents on an
// accelerator are not compared, because that would wait for the device; there only tensors that
// require grad are shared.

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "hooks/depot/piece.h"
#include "hooks/depot/prefetch_order.h"
#include "hooks/depot/staying.h"
#include "remat/place.h"

namespace remat {

/// One saved tensor, either in place or with its contents in a piece.
class SavedElsewhere final : public InPlace {
 public:
  explicit SavedElsewhere(const at::Tensor& saved);
  /// Throws LibTorch's error if the contents have been changed since.
  at::Tensor unpack();
  c10::Storage storage_in_place() override;
  /// The elements, in place or loaded back.
  struct Contents {
    c10::Storage storage;
    c10::VariableVersion counter;  ///< of tensors in it
    int64_t offset = 0;            ///< of the saved tensor
    bool is_new = false;           ///< was loaded by this call
    bool was_begun = false;        ///< and the load had begun before this call
  };
  /// Returns the contents. Throws as `unpack`. Code must not write to tensors made of them while
  /// the tensor is in place.
  Contents contents();

 private:
  friend class Depot;
  void check_version() const;
  at::Tensor rebuild(Piece& piece) const;

  std::mutex mutex_;     ///< for the members that a move changes; not held while a place works
  at::Tensor in_place_;  ///< without history; undefined when moved
  bool had_elements_;    ///< whether it was a plain tensor in memory at the save
  std::shared_ptr<Piece> piece_;
  c10::VariableVersion counter_{c10::VariableVersion::DISABLED};
  uint32_t version_ = 0;
  bool raises_if_changed_ = false;  ///< also when moved
  // For a tensor that may move later (Note [What stays]).
  std::unique_ptr<Staying::Share> share_;
  std::shared_ptr<PrefetchOrder> order_;
  uint64_t number_ = 0;
  // For a moved tensor: its former metadata.
  c10::SmallVector<int64_t, 4> sizes_, strides_;
  int64_t offset_ = 0;
  c10::DispatchKeySet keys_;
  caffe2::TypeMeta dtype_;
};

struct DepotOptions {
  int64_t min_bytes = 0;
  bool skip_parameters = true;
  bool raises_if_changed = false;  ///< as plain autograd does; also for copied tensors
  int64_t prefetch_depth = 0;
  int64_t max_bytes_in_flight = std::numeric_limits<int64_t>::max();
  /// The budget of tensors in place; null: every movable tensor moves when it is saved.
  std::shared_ptr<Staying> staying = nullptr;
  std::shared_ptr<MoveTotals> totals = nullptr;  ///< counts of moves; null: no counts
};

/// Returns whether a tensor is a leaf that requires grad, or a view of one. (The result of `detach`
/// does not show its origin.)
bool is_parameter(const at::Tensor& tensor);

/// Functions of the runtime that a depot needs.
struct DepotSurroundings {
  AroundPlace around;
  PrefetchOrder::AtEndOfBackward at_end;
};

class Depot final {
 public:
  /// Makes a depot. Depots may share a place.
  Depot(std::shared_ptr<Place> place, DepotOptions options, DepotSurroundings surroundings);

  /// Takes a saved tensor. `stands_for`: the tensor of which it is a copy or an alias without
  /// history, and to which no operator writes at the moment; or null. Throws the errors of the
  /// place.
  std::shared_ptr<SavedElsewhere> take(const at::Tensor& saved, const at::Tensor* stands_for);
  /// Takes the memory of a tensor without gaps, now. The caller guarantees that writes to it
  /// meanwhile do no harm. `number`: position in the order of saving, chosen by the caller. Returns
  /// null if the place leaves the tensor in place.
  std::shared_ptr<Piece> keep(const at::Tensor& dense, uint64_t number);
  /// Keeps a tensor in place until tensors that come after it in the order of saving exceed the
  /// budget. Returns null if the depot has no budget, or if the tensor could not move. `number`,
  /// `has_to_move`, `on_move`: as in Staying::Entry.
  struct StayAs {
    uint64_t number;
    bool has_to_move;
    std::function<void()> on_move;
  };
  std::shared_ptr<SavedElsewhere> keep_in_place(const at::Tensor& value, StayAs as);
  /// Moves tensors that exceed the budget now. Throws if a tensor cannot be moved that has to; it
  /// stays in place.
  void move_excess();
  /// Returns whether a tensor would be moved.
  bool moves(const at::Tensor& tensor) const;
  /// Moves the tensors that waited for the end of their operators. Call it when no operator runs on
  /// this thread. A tensor that cannot be moved stays, with a warning.
  void settle() noexcept;
  /// Waits until all stores have released the originals. Call it only with a bound on the bytes in
  /// flight.
  void finish_stores() { finish_stores_before(options_.max_bytes_in_flight); }
  /// Begins the loads of all pieces, since the backward on this thread will soon read them. Call it
  /// only with a prefetch depth.
  void begin_loads() { order_->begin_all(); }
  /// Begins the loads of pieces below this number, up to the depth.
  void begin_loads_before(uint64_t number) {
    if (order_ != nullptr) order_->prefetch_before(number);
  }

 private:
  /// A tensor saved by an operator that may still run.
  struct Unsettled {
    std::thread::id thread;
    uint64_t operator_number;
    std::optional<c10::Stream> stream;  ///< on which the operator was queued
    std::weak_ptr<SavedElsewhere> saved;
  };
  void settle_other_operators(uint64_t operator_number);
  std::vector<Unsettled> take_unsettled(const uint64_t* but_operator);
  void settle(const Unsettled& unsettled);
  void stay(const std::shared_ptr<SavedElsewhere>& saved, const at::Tensor& judged,
            Staying::Entry entry);
  void move_excess(c10::Device device, const SavingOperator* running);
  struct MoveAs {
    bool is_trusted;
    uint64_t number = 0;  ///< position in the order of saving; 0: the last
    /// Batch of tensors that move at once and to which no code writes meanwhile; 0: no batch.
    uint64_t batch = 0;
  };
  void move(SavedElsewhere& saved, const MoveAs& as);
  /// A piece, with the state of its original when the piece was made: Note [Sharing pieces].
  struct Known {
    std::weak_ptr<Piece> piece;
    int64_t begin, end;  ///< in the storage [bytes]
    c10::ScalarType kind;
    c10::VariableVersion counter;
    uint32_t version;
    bool is_trusted;  ///< only in-place operators write to the original
    uint64_t batch;   ///< until whose end no code writes to it
    uint64_t hash;    ///< of contents on the CPU that the place cannot compare
  };
  bool is_same(const Known& known, const Piece& piece, const at::Tensor& tensor,
               const MoveAs& as) const;
  std::shared_ptr<Piece> piece_for(const at::Tensor& tensor, int64_t begin, int64_t end,
                                   const MoveAs& as);
  bool bounds_stores() const {
    return options_.max_bytes_in_flight < std::numeric_limits<int64_t>::max();
  }
  void finish_stores_before(int64_t bytes);

  const std::shared_ptr<Place> place_;
  const bool is_comparable_;  ///< by the place, on the CPU
  const DepotOptions options_;
  const DepotSurroundings surroundings_;
  const std::shared_ptr<PrefetchOrder> order_;  ///< null if no loads begin ahead
  std::mutex mutex_;                            ///< not held while a place works
  std::unordered_map<const c10::StorageImpl*, std::vector<Known>> known_;
  std::size_t max_known_ = 64;  ///< number of storages from which the dead ones are erased
  std::vector<Unsettled> unsettled_;
  std::atomic<bool> has_unsettled_{false};
  std::atomic<uint64_t> num_batches_{0};
  /// Unfinished stores of contents that are stored late, oldest first.
  struct Storing {
    std::weak_ptr<Piece> piece;
    int64_t bytes;
  };
  std::deque<Storing> storing_;
  int64_t storing_bytes_ = 0;
};

}  // namespace remat
