#pragma once
// The values that one task recomputed of a frame and that backward has not read yet, and the state
// of their recompute.

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "lib/base/spin_lock.h"
#include "lib/frame/recorded_frame.h"
#include "lib/frame/task.h"
#include "lib/state/streams.h"

namespace remat {

/// A recomputed tensor that backward has not read yet.
struct Value {
  at::Tensor tensor;
  /// For a tensor with other owners: an alias of its data at the save, independent of later changes
  /// of the object.
  at::Tensor alias;
  std::shared_ptr<const Ready> ready{};  ///< null on the CPU
  uint32_t version = 0;
  bool is_own_alias = false;  ///< of the saved tensor; owned only here and by the recomputed graph
  /// The number of further owners of an own alias: the object of another language that came with
  /// it.
  uint8_t num_companions = 0;
  int64_t bytes = 0;
};

/// A frame's values for one task. The mutex of ValuesByTask guards them, except that the thread in
/// `owner` fills `values` while the state is Running.
struct RecomputedValues {
  enum class State { Running, Done };

  explicit RecomputedValues(TaskKey key) : task(key) {}
  ~RecomputedValues() { clear(); }
  RecomputedValues& operator=(RecomputedValues&&) = delete;

  /// Makes room for the values of that many slots.
  void reserve(std::size_t num_slots) { values.reserve(num_slots); }
  /// Stores a value. Returns its bytes, which the caller adds to the counter of live bytes.
  int64_t put(int64_t position, Value&& value);
  bool has(int64_t position) const;
  Value take(int64_t position);
  /// Returns the value without taking it.
  const Value& peek(int64_t position) const { return values[static_cast<std::size_t>(position)]; }
  int64_t num_bytes() const;
  bool has_values() const;
  /// Makes forward's streams wait for a value that was recomputed on others and that no code has
  /// read: the recompute may still use memory that is released with it.
  void wait_for_unread(int64_t position) const;
  void drop(int64_t position) noexcept;
  /// Returns whether the storage of a value has no owner outside. Replaces all values with that
  /// storage by aliases of the saved tensors.
  bool owns_alone(int64_t position);
  void clear() noexcept;

  /// Wakes the waiting threads after a change of `state` or `waits_for_backward`.
  void tell_change() noexcept;
  /// Waits until the next change. `lock`: that of ValuesByTask, released during the wait.
  void wait_for_change(std::unique_lock<SpinLock>& lock);

  TaskKey task;
  int64_t graph_task = -1;  ///< the engine's id of the backward that computed it
  State state = State::Running;
  std::thread::id owner = std::this_thread::get_id();
  /// True if the owner runs a backward inside the recompute, which may need a waiting thread.
  bool waits_for_backward = false;
  c10::SmallVector<Value, 4> values;  // by position
  /// The streams of a recompute ahead; null if it ran on forward's.
  std::unique_ptr<const StreamsBeside> beside{};
  /// Shows recorders the live bytes; null if the region is not recorded.
  std::shared_ptr<RecomputedBytes> recorded{};
  /// The backward that read each position, by the engine's id; -1: none. For strict_unpack and
  /// groups.
  std::vector<int64_t> handed_to;

 private:
  bool owns_sparse_alone(int64_t position);

  std::atomic<uint32_t> num_changes_{0};
};

}  // namespace remat
