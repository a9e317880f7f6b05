#pragma once
// The bounds of one thread's nested guards, and their reports.
//
// Note [Below the floor]
// Operands of the running operator, and tensors that the program holds, cannot be dropped. If they
// alone exceed the budget, dropping everything else after each operator would only cost time. So
// the bound is raised to a tenth above the memory that was needed, and the report counts the
// excess.

#include <c10/core/Device.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "lib/budget/moving.h"
#include "lib/observe/memory_source.h"
#include "remat/budget.h"

namespace remat::budget {

/// The options and the report of one guard. Guarded by the graph's lock.
struct Bound {
  explicit Bound(const BudgetOptions& options);
  bool is_of(c10::Device device) const { return options.device == device; }
  /// Counts the memory alive, if it is the most or over the limit.
  void note_alive(int64_t alive);
  const BudgetOptions options;
  MemorySource& memory;      ///< of the device
  const int64_t base_bytes;  ///< memory alive at the guard's construction
  int64_t most_bytes;        ///< limit of the live memory
  /// The place of copies, until the guard has ended and nothing is saved; null: nothing moves.
  std::shared_ptr<Mover> mover{};
  BudgetReport report;
};

/// The bounds of nested guards. Guarded by the graph's lock, except where a comment says otherwise.
class Bounds {
 public:
  void add(std::shared_ptr<Bound> bound);
  void remove(const Bound& bound);
  /// Returns the options of the innermost guard.
  const BudgetOptions& options() const { return all_.back()->options; }
  /// Returns the bytes below which a value is not dropped.
  int64_t min_bytes() const { return min_bytes_; }
  /// Returns the limit of the live memory on the device.
  int64_t most_bytes(c10::Device device) const;
  /// Returns the least limit that the guards asked for on the device.
  int64_t asked_bytes(c10::Device device) const;
  /// Returns the bound that refuses an allocation to `alive` bytes; or null.
  const Bound* refusing(c10::Device device, int64_t alive) const;

  // The functions below need no lock.
  /// Returns the bounds of accelerators.
  const c10::SmallVector<Bound*, 1>& far() const { return far_; }
  const c10::SmallVector<Bound*, 1>& moving() const { return moving_; }
  /// Returns whether values may move.
  bool has_movers() const { return !moving_.empty(); }
  /// Returns the devices of all bounds.
  c10::SmallVector<c10::Device, 1> devices() const;

  /// Returns the mover of the innermost guard on the device; may be null.
  std::shared_ptr<Mover> mover_on(c10::Device device) const;
  /// Moves the movers to `ended`.
  void end_movers(c10::SmallVectorImpl<std::shared_ptr<void>>& ended);

  /// Adds to the bytes of sources on the device.
  void source_held(c10::Device device, int64_t bytes);
  void note_operator();
  void note_rerun(double seconds);
  /// The result of making room for one allocation.
  struct Room {
    int64_t num_dropped, num_moved;
    double search_s;
    bool is_final;        ///< false: a copy is waited for, and the room is made again
    int64_t alive;        ///< [bytes] with the allocation
    int64_t least_alive;  ///< [bytes] with the allocation if all in the pool were dropped
  };
  /// Counts the room that was made, and raises the limit below the floor.
  void note_room(c10::Device device, const Room& made);
  /// Counts the memory alive in an operator that was not announced.
  void note_alive(c10::Device device, int64_t alive);

 private:
  std::vector<std::shared_ptr<Bound>> all_;  // outermost first
  int64_t min_bytes_ = 0;
  c10::SmallVector<Bound*, 1> far_, moving_;
};

}  // namespace remat::budget
