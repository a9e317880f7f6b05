#pragma once
// What one task recomputed of a frame: the values not yet handed over, and who is computing them.

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

/// A recomputed tensor as it waits for backward.
struct Value {
  at::Tensor tensor;
  /// Where others own the tensor, this alias has the data as they were at the save, whatever
  /// becomes of the object.
  at::Tensor alias;
  std::shared_ptr<const Ready> ready{};  ///< null on the CPU
  uint32_t version = 0;
  bool is_own_alias = false;  ///< of what was saved: owned here and by the recomputed graph alone
  /// But for these owners of an alias: the object of another language that it came with.
  uint8_t num_companions = 0;
  int64_t bytes = 0;
};

/// A frame has one for each task. The mutex of ValuesByTask guards it, except that the thread in
/// `owner` fills `values` while the state is Running.
struct RecomputedValues {
  enum class State { Running, Done };

  explicit RecomputedValues(TaskKey key) : task(key) {}
  ~RecomputedValues() { clear(); }
  RecomputedValues& operator=(RecomputedValues&&) = delete;

  /// Makes room for the values of that many slots.
  void reserve(std::size_t num_slots) { values.reserve(num_slots); }
  /// Returns its bytes, which the caller adds to the counter of those alive.
  int64_t put(int64_t position, Value&& value);
  bool has(int64_t position) const;
  Value take(int64_t position);
  /// The value stays.
  const Value& peek(int64_t position) const { return values[static_cast<std::size_t>(position)]; }
  int64_t num_bytes() const;
  void drop(int64_t position) noexcept;
  /// Whether the storage of a value has no owner outside. The values that have it are then
  /// aliases of what was saved, not the same objects.
  bool owns_alone(int64_t position);
  void clear() noexcept;

  /// `state` or `waits_for_backward` has changed.
  void tell_change() noexcept;
  /// Until the next change; `lock` is that of ValuesByTask, and not held meanwhile.
  void wait_for_change(std::unique_lock<SpinLock>& lock);

  TaskKey task;
  int64_t graph_task = -1;  ///< the engine's id of the backward that computed it
  State state = State::Running;
  std::thread::id owner = std::this_thread::get_id();
  /// The owner runs a backward inside the recompute: a waiting thread could be the one it needs.
  bool waits_for_backward = false;
  c10::SmallVector<Value, 4> values;  // by position
  /// Recorders see what is alive by it; null if the region is not recorded.
  std::shared_ptr<RecomputedBytes> recorded{};
  /// By position, where it is asked for: the engine's id of the backward that read it, or -1.
  std::vector<int64_t> handed_to;

 private:
  bool owns_sparse_alone(int64_t position);

  std::atomic<uint32_t> num_changes_{0};
};

}  // namespace remat
