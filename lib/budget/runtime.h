#pragma once
// The budget of one thread: its values, the room for allocations, and the moves.
//
// Note [Room on accelerators]
// The CPU's allocator asks for room inside each allocation. The allocators of accelerators do not,
// so room is made before each operator: for the bytes that a call with the same operator and shapes
// took before. The first such call is not known and may exceed the budget; the report counts it.
// An allocator that can announce its allocations does so by remat::announce_allocation.

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lib/budget/bounds.h"
#include "lib/budget/graph.h"
#include "lib/budget/moves.h"
#include "lib/budget/pool.h"
#include "lib/observe/recording.h"

namespace remat::budget {

/// The state shared by nested guards of one thread. Callers hold the graph's lock, except where a
/// comment says otherwise.
class Runtime : public std::enable_shared_from_this<Runtime> {
 public:
  /// `bound` belongs to the outermost guard and applies as long as values live. Call this, the
  /// destructor, `add` and `remove` without the lock.
  explicit Runtime(std::shared_ptr<Bound> bound);
  ~Runtime();
  Runtime& operator=(Runtime&&) = delete;
  /// Adds the bound of a nested guard.
  void add(std::shared_ptr<Bound> bound);
  void remove(const Bound& bound);
  Bounds& bounds() { return bounds_; }
  const Bounds& bounds() const { return bounds_; }

  /// Keeps the content of a value with a record alive, in the pool.
  void hold(Value& value, c10::Storage storage);
  /// Releases a content that neither a saved tensor nor a rerun needs.
  void drop_if_unneeded(Value& value, Dead& dead);
  void unpool(Value& value);

  // See Note [Moving].
  /// Copies values away beside the work, after an operator. Without the lock.
  void move_ahead();
  /// Puts a source that the budget keeps alive into the pool, if it may move.
  void add_source(Value& value);
  /// Returns the source of a saved tensor that may move; or null.
  Value* source_to_move(const at::Tensor& saved, Dead& dead);
  /// Gives up a value's copy.
  void end_move(Value& value, Dead& dead);

  /// Counts saved tensors; the end of the last one ends all records.
  void note_save() { num_saved_.fetch_add(1, std::memory_order_relaxed); }
  void note_end_of_save(Dead& dead) {
    if (num_saved_.fetch_sub(1, std::memory_order_relaxed) == 1) end_step(dead);
  }
  /// Ends all records, since nothing is saved.
  void end_step(Dead& dead);
  /// Closes the runtime at the end of the outermost guard.
  void close(Dead& dead);
  /// Returns whether tensors are saved. Any thread, without the lock.
  bool has_saved() const { return num_saved_.load(std::memory_order_relaxed) > 0; }

  /// Describes an allocation to `make_room`.
  struct Wanted {
    c10::Device device;
    int64_t bytes;
    bool in_allocator;                       ///< so that the thread cannot run operators
    std::vector<recording::Eviction>* told;  ///< gets each dropped value; or null
  };
  /// Drops values before an allocation on a device. Returns the bytes dropped. `copy`: set to a
  /// copy for which the caller should wait without the lock, before it tries again; null: no more
  /// can be done.
  int64_t make_room(const Wanted& wanted, int64_t live_bytes, Dead& dead,
                    std::shared_ptr<Moved>& copy);
  /// Returns whether calls on the stream are recorded: the first one that works on its device.
  bool is_own(const c10::Stream& stream);
  /// Returns the streams whose calls are recorded, one for each device.
  const c10::SmallVector<c10::Stream, 1>& own_streams() const { return streams_; }

  double clock = 0;   ///< [seconds] sum of the costs of recorded operators
  double cursor = 0;  ///< [seconds] the clock at the save that is made or read now

 private:
  Pool& pool_on(c10::Device device);

  Bounds bounds_;
  Moves moves_{bounds_};
  c10::SmallVector<Pool, 1> pools_;
  c10::SmallVector<c10::Stream, 1> streams_;  // of accelerators
  bool is_closed_ = false;
  std::atomic<int64_t> num_saved_{0};
};

/// Visits all runtimes of the process. The caller holds the graph's lock.
void visit_runtimes(c10::function_ref<void(Runtime&)> visitor);

/// Throws the error in the form of a binding's language, if a binding has set one.
void raise_in_binding(const c10::Error& error);

}  // namespace remat::budget
