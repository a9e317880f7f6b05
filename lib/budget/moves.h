#pragma once
// The copies of one thread's values that are under way, and the choice of the next ones.

#include <cstdint>
#include <memory>
#include <vector>

#include "lib/budget/bounds.h"
#include "lib/budget/pool.h"

namespace remat::budget {

/// See Note [Moving]. Guarded by the graph's lock.
class Moves {
 public:
  explicit Moves(const Bounds& bounds) : bounds_(bounds) {}
  /// Gives up a value's copy.
  void end(Value& value, Dead& dead);
  /// Looks for copies that have ended.
  void settle(Dead& dead);
  /// Returns a copy whose end makes room in the pool, and starts one if none is under way; null:
  /// there is none. `in_allocator`: the thread cannot run operators.
  std::shared_ptr<Moved> copy_to_wait_for(Pool& pool, bool in_allocator);
  /// Starts copies of values until `most_ahead` bytes are copied. The caller begins them without
  /// the lock.
  std::vector<std::shared_ptr<Moved>> choose(Pool& pool, const Mover& mover, int64_t most_ahead);

 private:
  /// Returns whether a copy of the value can begin.
  bool can_move(Pool& pool, Value& value, const Mover& mover) const;
  std::shared_ptr<Moved> start(Value& value);

  const Bounds& bounds_;
  std::vector<Value*> under_way_{};
};

}  // namespace remat::budget
