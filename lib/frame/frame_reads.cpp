// Frame in backward: reads of slots, and the recomputes that they begin, wait for or share.

#include <algorithm>
#include <utility>

#include "lib/base/invariant.h"
#include "lib/base/planted_fault.h"
#include "lib/frame/frame.h"
#include "lib/frame/mismatch.h"
#include "lib/frame/recompute.h"
#include "lib/frame/shared_recomputes.h"

namespace remat {

Frame::SlotView Frame::view_for(int64_t only_position) {
  std::lock_guard<SpinLock> lock(mutex_);
  SlotView view;
  view.is_settled = is_settled_;
  view.is_needed.resize(slots_.size());
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const auto position = static_cast<int64_t>(i);
    view.has_own_output |= slots_[i].saves_own_output;
    if (only_position >= 0 ? position != only_position : !slots_[i].is_alive) continue;
    view.is_needed[i] = 1;
    view.last_needed = position;
    ++view.num_needed;
  }
  view.ends_small = ends_small_ && view.last_needed + 1 == static_cast<int64_t>(slots_.size());
  return view;
}

void Frame::drop_slot(int64_t position) noexcept {
  // Tensors die outside the lock: in a Python process that may wait for the interpreter's lock.
  c10::SmallVector<Value, 1> dying;
  std::lock_guard<SpinLock> lock(mutex_);
  slots_[at_position(position)].is_alive = false;
  for (const auto& run : runs_)  // what is being filled is dropped when the task ends
    if (run->state == Run::State::Done && run->has(position)) dying.push_back(run->take(position));
}

HeldInfo Frame::describe_slot(int64_t position) {
  std::lock_guard<SpinLock> lock(mutex_);
  const TensorMetadata& metadata = slots_[at_position(position)].metadata;
  return {.sizes = metadata.sizes(),
          .dtype = metadata.dtype(),
          .bytes = metadata.num_bytes(),
          .region = name(),
          .dropped = true};
}

void Frame::end_task(const TaskKey& task) noexcept {
  if (is_planted(Fault::TaskEnd)) return;
  std::shared_ptr<Run> ended;
  std::lock_guard<SpinLock> lock(mutex_);
  const auto found =
      std::find_if(runs_.begin(), runs_.end(), [&](const auto& run) { return run->task == task; });
  if (found == runs_.end()) return;
  ended = std::move(*found);
  runs_.erase(found);
}

at::Tensor Frame::read_alone(int64_t position) {
  Run run(TaskKey{});
  recompute(c10::intrusive_ptr<Frame>::reclaim_copy(this), run, position);
  return hand_over(*this, position, run.take(position));
}

// Rule 4: unpacked is released, except that a cache keeps the value for the next backward.
Value Frame::take_or_copy(Run& run, int64_t position, const Task& task) {
  const bool is_cached = run.task.kind == TaskKey::Kind::Cache;
  if (options_.strict_unpack || run.task.kind == TaskKey::Kind::Group) {
    run.handed_to.resize(slots_.size(), -1);
    run.handed_to[at_position(position)] = task.graph.id;
  }
  return is_cached ? run.peek(position) : run.take(position);
}

// A value was kept for another backward. Its captures and inputs must be as they were when it was
// computed; otherwise the recompute that follows says what is wrong with them.
bool Frame::is_fresh(const Run& run) const {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const auto position = static_cast<int64_t>(i);
    if (run.has(position)) {
      const Value& value = run.peek(position);
      if (static_cast<uint32_t>(value.tensor._version()) != value.version) return false;
    }
    if (options_.capture_check == CaptureCheck::Raise && is_leaf_changed(slots_[i].provenance))
      return false;
  }
  return true;
}

at::Tensor Frame::read_slot(int64_t position) {
  const std::optional<Task> task = current_task();
  if (!task) return read_alone(position);

  const auto self = c10::intrusive_ptr<Frame>::reclaim_copy(this);
  const auto index = at_position(position);
  TaskKey key = task->shared ? task->shared->key() : task->graph;
  std::unique_lock<SpinLock> lock(mutex_);
  std::shared_ptr<Run> run, stale;
  const auto take_and_unlock = [&] {
    Value value = take_or_copy(*run, position, *task);
    lock.unlock();
    return hand_over(*this, position, std::move(value));
  };
  for (;;) {
    auto found = std::find_if(runs_.begin(), runs_.end(), [&](const auto& each) {
      return each->task == key || (each->task == task->graph && each->state == Run::State::Done);
    });
    if (found == runs_.end()) {
      run = std::make_shared<Run>(key);
      runs_.push_back(run);
      break;
    }
    run = *found;
    if (run->state == Run::State::Running) {
      if (run->owner == std::this_thread::get_id() || run->waits_for_backward) {
        lock.unlock();
        return read_alone(position);
      }
      run->wait_for_change(lock);
      continue;
    }
    const int64_t read_by = index < run->handed_to.size() ? run->handed_to[index] : -1;
    if (options_.strict_unpack && read_by == task->graph.id) throw_double_unpack(*this, position);
    if (run->task.kind == TaskKey::Kind::Group && read_by >= 0 && read_by != task->graph.id)
      throw_group_overlap(*this, position);
    if (run->graph_task != task->graph.id && !is_fresh(*run)) {
      stale = std::move(*found);  // dies without the lock
      runs_.erase(found);
      continue;
    }
    run->graph_task = task->graph.id;
    if (run->has(position)) {
      if (run->task.kind == TaskKey::Kind::Cache) {
        const Value value = take_or_copy(*run, position, *task);
        lock.unlock();
        task->shared->touch(*this);
        return hand_over(*this, position, value);
      }
      return take_and_unlock();
    }
    run->state = Run::State::Running;
    run->owner = std::this_thread::get_id();
    break;
  }

  // This thread recomputes; the others of the task wait (Rule 7).
  lock.unlock();
  stale.reset();
  try {
    if (task->shared == nullptr) notify_at_task_end(task->graph, self);
    recompute(self, *run);
    if (task->shared != nullptr && !task->shared->add(self, run->num_bytes())) {
      // Too large for the cache: kept as without one, until this backward has read it.
      notify_at_task_end(task->graph, self);
      key = task->graph;
    }
  } catch (...) {
    lock.lock();
    runs_.erase(std::remove(runs_.begin(), runs_.end(), run), runs_.end());
    run->state = Run::State::Done;
    run->tell_change();
    throw;
  }
  lock.lock();
  run->task = key;
  run->graph_task = task->graph.id;
  run->state = Run::State::Done;
  run->tell_change();
  REMAT_INVARIANT(run->has(position), "frame {}: slot {} stayed empty", id_, position);
  return take_and_unlock();
}

}  // namespace remat
