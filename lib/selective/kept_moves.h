#pragma once
// What one region gives to the depot of kept results, and in which order that comes back.
//
// Note [Moving kept results]
// What a policy wants on the CPU goes to a depot, as what guards move does: copies beside the work,
// with a bound on what is on its way, and back ahead of the recompute that reads it. What is not as
// it is for guards:
//
// The order. Backward recomputes regions in the reverse order of their forwards, but a recompute
// reads what its region keeps in the order of forward's calls. So a region has a range of numbers
// to itself, after those of the regions before it, and counts down in it. Going down from any
// number the depot's order meets the rest of the region, then the region before it from its
// beginning (Note [Prefetching]). A recompute begins the loads of its first results before its
// function runs. A result of which the recompute stops short was loaded for nothing, and is
// cancelled.
//
// Writes. A copy beside the work may have what is written to the original meanwhile. A saved tensor
// raises then; a kept result need not: it is the region's own, and while its function runs our
// dispatch mode sees who writes to it, whereupon it is not kept after all
// (Note [Writing to a kept result]). When the function is over, a result that somebody still has
// (the region returned it, say) is waited for by the device's next work. Whatever is written later
// comes after the copy. A result that nobody has can be written to by nobody. Who writes past the
// dispatcher meanwhile is not seen. Where that is to be expected (in a Function's forward, where
// autograd is off; on threads that the function starts; in a backward inside) the device's next
// work waits for the copy at once. So it does for a value that is kept because of its name alone.
//
// The last ones. `keep_last` of them stay, by those numbers: of the region that ran last the first,
// then the first of the region before it. So a result leaves when a region that runs later keeps
// some, or at once if its own region has kept enough before it. That is looked at when something is
// kept, and when a forward ends; and as for guards (Note [What stays]), what others hold as well
// neither counts nor moves. So nobody can write to what is copied then.
//
// What lies around. In another region, or with `save_through_hooks`, what is kept is saved through
// the hooks around, which want a tensor: Note [Twins].

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "hooks/depot/depot.h"
#include "remat/policy.h"

namespace remat {

/// Any thread.
class KeptMoves {
 public:
  /// `region`: its number; regions that begin later have larger ones. `options` outlive it.
  KeptMoves(int64_t region, const SelectiveOptions& options) : region_(region), options_(options) {}

  /// Takes the memory of a tensor without gaps. `is_beside`: writers are seen to until the piece's
  /// store is finished; else they wait for it. `has_to_move`: that it could not be copied is an
  /// error, now or of the piece. Throws what copying throws.
  std::shared_ptr<Piece> move(const at::Tensor& value, bool is_beside, bool has_to_move);
  /// The same of a tensor that may stay where it is, as long as it is among the last; see
  /// SelectiveOptions. Null: none stays, or it would not move. `on_move`: when it has moved after
  /// all, on any thread; or empty.
  std::shared_ptr<SavedElsewhere> keep_in_place(const at::Tensor& value, bool has_to_move,
                                                std::function<void()> on_move);
  /// Moves those that are not among the last any more. Throws if one that has to move cannot.
  void move_excess();
  /// A recompute begins on this thread. `behind_hooks`: the largest number of what it has fetched
  /// through hooks.
  void begin_loads(uint64_t behind_hooks) const;
  /// [ns] that threads have spent on it.
  int64_t spent_ns() const { return spent_ns_; }

 private:
  uint64_t number_of(uint64_t index) const;
  const std::shared_ptr<Depot>& depot() const;

  const int64_t region_;
  const SelectiveOptions& options_;
  std::atomic<uint64_t> num_moved_{0};
  std::atomic<int64_t> spent_ns_{0};
};

}  // namespace remat
