#pragma once
// What one guard has put into a place: which tensors, in which pieces, for whom.
//
// Note [What is moved]
// A tensor moves if it is a plain strided one with data, no parameter (a leaf that requires grad,
// or a view of one), large enough, and if the place takes it. The piece of its storage that moves:
//   the whole storage   if the tensor has at least a quarter of it (or it is small): then every view
//                       shares one piece, and comes back with its offset;
//   its own range     else, if at most three quarters of that are gaps: it comes back at offset 0.
// Any other tensor stays: a thin slice of something large would cost more elsewhere than here.
// Bytes of a range are copied as they lie, so overlapping and expanded views come back as they
// were.
//
// Note [When contents are copied]
// Generated code saves an argument that the kernel has yet to write (the noise of rrelu). Such a
// buffer takes no part in differentiation, so it does not require grad. What requires grad is
// copied when it is saved. What does not waits, as it is, until its operator is over: that is,
// until this thread saves for another operator (operators that save have a node, and nodes are
// numbered), or the guard ends. If it was changed in place by then it is not copied, and stays.
//
// A tensor that stays is kept with its version, and reading it after a change in place raises as
// plain autograd does: LibTorch checks no version where there are hooks. What was copied keeps the
// values of the save, unless the copy may be made later than it was asked for
// (StoredContents::is_stored_late): then a change raises too.
//
// Note [Sharing pieces]
// Two saved tensors share a piece if they have the same storage object, alive all the time, the
// same version counter and version, and equal contents: a write through `.data` leaves the version
// alone. Contents on the CPU are compared when a second save asks, by the place where it can
// (ComparablePlace), byte by byte with its copy; for other places they are hashed before each copy,
// in 64 bits. Most are never asked for again, so what is saved once is not read but to be copied.
// What moves because there is no room for it has been let go of by all others: saved tensors of one
// storage that move at once share a piece without a look at it. Contents on an accelerator are not
// compared, which would wait for the device; there only tensors that require grad are shared.

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

/// One saved tensor: it is where it was, or its contents are in a piece.
class SavedElsewhere final : public InPlace {
 public:
  explicit SavedElsewhere(const at::Tensor& saved);
  /// Throws LibTorch's error if the contents have been changed since.
  at::Tensor unpack();
  c10::Storage storage_in_place() override;
  /// The elements, where they were or as they came back.
  struct Contents {
    c10::Storage storage;
    c10::VariableVersion counter;  ///< of tensors in it
    int64_t offset = 0;            ///< of the saved tensor
    bool is_new = false;           ///< came from the place just now
    bool was_begun = false;        ///< and had been begun before it was asked for
  };
  /// Throws as `unpack`. Tensors that are made of it may not be written to as long as it is in
  /// place.
  Contents contents();

 private:
  friend class Depot;
  void check_version() const;
  at::Tensor rebuild(Piece& piece) const;

  std::mutex mutex_;     ///< of what a move changes; not held while a place works
  at::Tensor in_place_;  ///< without history; undefined when moved
  bool had_elements_;    ///< a plain tensor in memory, at the save
  std::shared_ptr<Piece> piece_;
  c10::VariableVersion counter_{c10::VariableVersion::DISABLED};
  uint32_t version_ = 0;
  bool raises_if_changed_ = false;  ///< also when moved
  // Of one that may move later (Note [What stays]).
  std::unique_ptr<Staying::Share> share_;
  std::shared_ptr<PrefetchOrder> order_;
  uint64_t number_ = 0;
  // Of a moved one: what it was.
  c10::SmallVector<int64_t, 4> sizes_, strides_;
  int64_t offset_ = 0;
  c10::DispatchKeySet keys_;
  caffe2::TypeMeta dtype_;
};

struct DepotOptions {
  int64_t min_bytes = 0;
  bool skip_parameters = true;
  bool raises_if_changed = false;  ///< as plain autograd does; also what was copied
  int64_t prefetch_depth = 0;
  int64_t max_bytes_in_flight = std::numeric_limits<int64_t>::max();
  std::shared_ptr<Staying> staying = nullptr;    ///< null: all that can moves when it is saved
  std::shared_ptr<MoveTotals> totals = nullptr;  ///< what has moved; null: nobody counts
};

/// A leaf that requires grad, or a view of one. (What `detach` returns says nothing of its origin.)
bool is_parameter(const at::Tensor& tensor);

/// What only the runtime can do for a depot.
struct DepotSurroundings {
  AroundPlace around;
  PrefetchOrder::AtEndOfBackward at_end;
};

class Depot final : public std::enable_shared_from_this<Depot> {
 public:
  /// Depots may share a place.
  Depot(std::shared_ptr<Place> place, DepotOptions options, DepotSurroundings surroundings);

  /// Takes a saved tensor. `stands_for`: the tensor of which it is an alias without history, or a
  /// copy, and which no operator is writing; or null. Throws what the place throws.
  std::shared_ptr<SavedElsewhere> take(const at::Tensor& saved, const at::Tensor* stands_for);
  /// Takes the memory of a tensor without gaps, now. Its owner sees to it that what is written to
  /// it meanwhile does no harm. `number`: in the order of saving, of the owner's choice. Null: the
  /// place wants it to stay.
  std::shared_ptr<Piece> keep(const at::Tensor& dense, uint64_t number);
  /// Takes what its owner keeps, as it is, until there is too much of what comes after it in the
  /// order of saving. Null where nothing stays, or if it would not move. `number`, `has_to_move`,
  /// `on_move`: of Staying::Entry.
  struct StayAs {
    uint64_t number;
    bool has_to_move;
    std::function<void()> on_move;
  };
  std::shared_ptr<SavedElsewhere> keep_in_place(const at::Tensor& value, StayAs as);
  /// Moves what is too much of that by now. Throws if something cannot be moved that has to; it
  /// stays where it is.
  void move_excess();
  /// Whether a tensor would be moved.
  bool moves(const at::Tensor& tensor) const;
  /// No operator runs on this thread: what waited for its end is moved. What cannot be, stays; a
  /// warning says so.
  void settle() noexcept;
  /// What is on its way has left its storages. Only with a bound on the bytes in flight.
  void finish_stores() { finish_stores_before(options_.max_bytes_in_flight); }
  /// Backward, which runs on this thread, will soon read all. Only where loads are begun ahead.
  void begin_loads() { order_->begin_all(); }
  /// The same of what has a number below this, up to the depth.
  void begin_loads_before(uint64_t number) {
    if (order_ != nullptr) order_->prefetch_before(number);
  }

 private:
  friend class Piece;
  /// What an operator that may still run has saved.
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
    uint64_t number = 0;  ///< in the order of saving; 0: the last
    uint64_t batch =
        0;  ///< of what moves at once, and nobody writes to meanwhile; 0: it moves alone
  };
  void move(SavedElsewhere& saved, const MoveAs& as);
  std::shared_ptr<Piece> piece_for(const at::Tensor& tensor, int64_t begin, int64_t end,
                                   const MoveAs& as);
  void forget(const Piece& piece);
  bool bounds_stores() const {
    return options_.max_bytes_in_flight < std::numeric_limits<int64_t>::max();
  }
  void finish_stores_before(int64_t bytes);

  const std::shared_ptr<Place> place_;
  const DepotOptions options_;
  const DepotSurroundings surroundings_;
  const std::shared_ptr<PrefetchOrder> order_;  ///< null where nothing is loaded ahead
  std::mutex mutex_;                            ///< not held while a place works
  std::unordered_map<const c10::StorageImpl*, std::vector<std::weak_ptr<Piece>>> pieces_;
  std::vector<Unsettled> unsettled_;
  std::atomic<bool> has_unsettled_{false};
  std::atomic<uint64_t> num_batches_{0};
  /// What is stored late, oldest first, and may not be finished.
  struct Storing {
    std::weak_ptr<Piece> piece;
    int64_t bytes;
  };
  std::deque<Storing> storing_;
  int64_t storing_bytes_ = 0;
};

}  // namespace remat
