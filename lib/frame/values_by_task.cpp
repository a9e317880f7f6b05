#include "lib/frame/values_by_task.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "lib/base/invariant.h"
#include "lib/base/planted_fault.h"
#include "lib/frame/mismatch.h"
#include "lib/frame/shared_recomputes.h"
#include "lib/seam/autograd_meta.h"

namespace remat {

bool& reads_again() {
  thread_local bool is_on = false;
  return is_on;
}

// Rule 4: unpacked is released, except that a cache keeps the value for the next backward.
Value ValuesByTask::take(const Region& region, RecomputedValues& values, int64_t position,
                         const Task& task) {
  const bool is_cached = values.task.kind == TaskKey::Kind::Cache;
  const bool is_noted = region.options.strict_unpack || values.task.kind == TaskKey::Kind::Group;
  if (is_noted && task.graph != prepared) {  // a region inside may be prepared again
    values.handed_to.resize(std::max(values.handed_to.size(), at_position(position) + 1), -1);
    values.handed_to[at_position(position)] = task.graph.id;
  }
  return is_cached ? values.peek(position) : values.take(position);
}

// Returns whether values that were recomputed for another backward can still be used: captures and
// inputs must be unchanged. Otherwise the recompute that follows reports the change.
bool ValuesByTask::is_fresh(const Region& region, const Slots& slots,
                            const RecomputedValues& values) const {
  for (const Value& each : values.values)
    if (each.tensor.defined() && seam::version_of(each.tensor) != each.version) return false;
  return region.options.capture_check != CaptureCheck::Raise || !slots.is_any_leaf_changed();
}

ValuesByTask::Turn ValuesByTask::next(const Region& region, const Slots& slots, const Task& task,
                                      int64_t position, SlotOwner& owner) {
  Turn turn;
  const auto index = at_position(position);
  const TaskKey key = task.shared ? task.shared->key() : task.graph;
  std::shared_ptr<RecomputedValues> stale;  // dies without the lock
  std::unique_lock<SpinLock> lock(mutex_);
  for (;;) {
    auto found = std::find_if(all_.begin(), all_.end(), [&](const auto& each) {
      return each->task == key || each->task == task.graph;
    });
    if (found == all_.end())
      found = std::find_if(all_.begin(), all_.end(),
                           [](const auto& each) { return each->task == prepared; });
    if (found == all_.end()) {
      turn.values = all_.emplace_back(std::make_shared<RecomputedValues>(key));
      return turn;
    }
    RecomputedValues* const values = found->get();
    if (values->state == RecomputedValues::State::Running) {
      if (values->owner == std::this_thread::get_id() || values->waits_for_backward) {
        turn.what = Turn::What::ReadAlone;
        return turn;
      }
      if (!turn.owner) turn.owner = c10::intrusive_ptr<SlotOwner>::reclaim_copy(&owner);
      const std::shared_ptr<RecomputedValues> alive = *found;
      alive->wait_for_change(lock);
      continue;
    }
    const int64_t read_by = index < values->handed_to.size() ? values->handed_to[index] : -1;
    if (region.options.strict_unpack && read_by == task.graph.id && !reads_again()) {
      lock.unlock();
      throw_double_unpack(region, position, slots.identity_of(position));
    }
    if (values->task.kind == TaskKey::Kind::Group && read_by >= 0 && read_by != task.graph.id) {
      lock.unlock();
      throw_group_overlap(region, position, slots.identity_of(position));
    }
    if (values->graph_task != task.graph.id) {
      if (!is_fresh(region, slots, *values)) {
        stale = std::move(*found);
        all_.erase(found);
        continue;
      }
      turn.is_first = values->graph_task == prepared.id;
      if (turn.is_first) values->task = key;
      values->graph_task = task.graph.id;
    }
    if (values->has(position)) {
      turn.what = Turn::What::Take;
      turn.is_cached = values->task.kind == TaskKey::Kind::Cache;
      turn.value = take(region, *values, position, task);
      return turn;
    }
    values->state = RecomputedValues::State::Running;
    values->owner = std::this_thread::get_id();
    turn.values = *found;
    return turn;
  }
}

Value ValuesByTask::filled(const Region& region, const std::shared_ptr<RecomputedValues>& values,
                           const TaskKey& key, const Task& task, int64_t position) {
  std::lock_guard<SpinLock> lock(mutex_);
  values->task = key;
  values->graph_task = position < 0 ? prepared.id : task.graph.id;
  values->state = RecomputedValues::State::Done;
  values->tell_change();
  if (position < 0) return {};
  REMAT_INVARIANT(values->has(position), "frame {}: slot {} stayed empty", region.info.id,
                  position);
  return take(region, *values, position, task);
}

std::shared_ptr<RecomputedValues> ValuesByTask::begin_ahead(const Task& task,
                                                            const TaskKey& owner) {
  std::lock_guard<SpinLock> lock(mutex_);
  for (const auto& each : all_) {
    const bool is_of_task =
        each->task == task.graph || (task.shared && each->task == task.shared->key());
    if (is_of_task || each->state == RecomputedValues::State::Running || each->has_values())
      return nullptr;
  }
  return all_.emplace_back(std::make_shared<RecomputedValues>(owner));
}

void ValuesByTask::leave_cache(const Task& task) {
  std::lock_guard<SpinLock> lock(mutex_);
  for (const auto& each : all_)
    if (each->task == task.shared->key()) each->task = task.graph;
}

int64_t ValuesByTask::num_bytes(const TaskKey& key) {
  std::lock_guard<SpinLock> lock(mutex_);
  int64_t bytes = 0;
  for (const auto& each : all_)
    if (each->task == key) bytes += each->num_bytes();
  return bytes;
}

void ValuesByTask::failed(const std::shared_ptr<RecomputedValues>& values) noexcept {
  std::lock_guard<SpinLock> lock(mutex_);
  all_.erase(std::remove(all_.begin(), all_.end(), values), all_.end());
  values->state = RecomputedValues::State::Done;
  values->tell_change();
}

void ValuesByTask::owner_waits_for_backward(RecomputedValues& values) {
  std::lock_guard<SpinLock> lock(mutex_);
  values.waits_for_backward = true;
  values.tell_change();
}

void ValuesByTask::drop(int64_t position) noexcept {
  // Tensors are released outside the lock, as that may wait for the interpreter's lock in a Python
  // process.
  c10::SmallVector<Value, 1> dying;
  std::lock_guard<SpinLock> lock(mutex_);
  for (const auto& values : all_)  // values being filled are dropped when the task ends
    if (values->state == RecomputedValues::State::Done && values->has(position)) {
      values->wait_for_unread(position);
      dying.push_back(values->take(position));
    }
}

void ValuesByTask::end_task(const TaskKey& task) noexcept {
  if (is_planted(Fault::TaskEnd)) return;
  std::shared_ptr<RecomputedValues> ended;
  std::lock_guard<SpinLock> lock(mutex_);
  const auto found = std::find_if(all_.begin(), all_.end(),
                                  [&](const auto& values) { return values->task == task; });
  if (found == all_.end()) return;
  ended = std::move(*found);
  all_.erase(found);
}

}  // namespace remat
