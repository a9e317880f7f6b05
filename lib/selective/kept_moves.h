#pragma once
// The kept results that one region moves by the depot, and the order of their loads.
//
// Note [Moving kept results]
// Results that a policy moves to the CPU go to a depot, like tensors that guards move. Copies run
// beside other work, with a limit on their bytes, and loads begin ahead of the recompute that reads
// them. The differences from guards are:
//
// The order. Backward recomputes regions in the reverse order of their forwards, but a recompute
// reads its kept results in the order of forward's calls. Each region therefore has its own range
// of numbers, after those of earlier regions, and counts down in it. From any number downwards, the
// depot's order has the rest of the region, then the region before it from its beginning
// (Note [Prefetching]). A recompute begins the loads of its first results before its function runs.
// Loads of results that the recompute does not reach are canceled.
//
// Writes. A copy beside other work may contain later writes to the original. For a saved tensor
// this is an error. For a kept result it need not be: the result belongs to the region. While the
// region's function runs, the dispatch mode sees each write to it, and the result is then not kept
// (Note [Writing to a kept result]). When the function is over, the device's next work waits for
// the copies of results that still have an owner (such as the region's result). Later writes then
// come after the copy. A result without an owner cannot be written to. Writes that bypass the
// dispatcher are not seen. Where they are likely, the device's next work waits for the copy at
// once: in a Function's forward, where autograd is off; on threads that the function starts; in a
// backward inside. It also waits at once for a value that is kept only because of its name.
//
// The last results. `keep_last` results stay, in the order of those numbers: the first ones of the
// region that ran last, then the first ones of the region before it. A result therefore moves when
// a later region keeps results, or at once if its own region has kept enough before it. This is
// checked when a result is kept, and when a forward ends. As for guards (Note [What stays]),
// results with other owners neither count nor move, so a result that moves then cannot be written
// to.
//
// Enclosing hooks. In another region, or with `save_through_hooks`, kept results are saved through
// the enclosing hooks, which need a tensor: they get a plain copy (Note [Kept values]).

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "hooks/depot/depot.h"
#include "lib/frame/frame.h"
#include "lib/selective/kept_tensor.h"
#include "remat/policy.h"

namespace remat {

/// The moves of one region. Any thread.
class KeptMoves {
 public:
  /// Makes the moves of a region, which must outlive this object, as must `options`.
  KeptMoves(const Frame& frame, const SelectiveOptions& options)
      : frame_(frame), options_(options) {}

  /// Returns the place of a result that is kept by `answer`. `is_beside`: see `move`.
  KeptPlace place_of(const at::Tensor& value, CheckpointPolicy answer, bool is_beside);
  /// Moves the memory of a tensor without gaps. `is_beside`: the caller handles writes until the
  /// piece's store is finished; otherwise later work waits for the store. `has_to_move`: a failed
  /// copy is an error, now or later of the piece. Throws the error of the copy.
  std::shared_ptr<Piece> move(const at::Tensor& value, bool is_beside, bool has_to_move);
  /// Keeps a tensor in place as long as it is among the last; see SelectiveOptions. Returns null if
  /// no results stay, or the tensor could not move. `on_move`: called on any thread when the tensor
  /// has moved later; may be empty.
  std::shared_ptr<SavedElsewhere> keep_in_place(const at::Tensor& value, bool has_to_move,
                                                std::function<void()> on_move);
  /// Moves the tensors that are no longer among the last. Throws if a tensor that has to move
  /// cannot.
  void move_excess();
  /// Begins the first loads of a recompute on this thread.
  void begin_loads() const;
  /// Returns the time [ns] that threads have spent on moves.
  int64_t spent_ns() const { return spent_ns_; }

 private:
  uint64_t number_of(uint64_t index) const;
  const std::shared_ptr<Depot>& depot() const;

  const Frame& frame_;
  const SelectiveOptions& options_;
  std::atomic<uint64_t> num_moved_{0};
  std::atomic<int64_t> spent_ns_{0};
};

}  // namespace remat
