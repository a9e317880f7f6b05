// Frame in backward: reads of slots, and the recomputes that they begin, wait for or share.

#include <utility>

#include "lib/base/planted_fault.h"
#include "lib/frame/ahead.h"
#include "lib/frame/frame.h"
#include "lib/frame/mismatch.h"
#include "lib/frame/recompute.h"
#include "lib/frame/shared_recomputes.h"
#include "lib/seam/autograd_meta.h"

namespace remat {

namespace {
using WeakFrame = c10::weak_intrusive_ptr<Frame>;
}  // namespace

void Frame::drop_slot(int64_t position) noexcept {
  slots_.drop(position);
  values_.drop(position);
}

HeldInfo Frame::describe_slot(int64_t position) { return slots_.describe(position, region_); }

void Frame::end_task(const TaskKey& task) noexcept { values_.end_task(task); }

at::Tensor Frame::read_slot(int64_t position) {
  using What = ValuesByTask::Turn::What;
  std::optional<Task> task = current_task();
  if (!task) task = task_prepared_for();
  ValuesByTask::Turn turn{.what = What::ReadAlone};
  if (task) turn = values_.next(region_, slots_, *task, position, *this);
  if (turn.what == What::Take) {
    if (turn.is_cached) task->shared->touch(*this);
    if (turn.is_first) take_over(c10::intrusive_ptr<Frame>::reclaim_copy(this), *task);
    return hand_over(position, std::move(turn.value));
  }
  const auto self = c10::intrusive_ptr<Frame>::reclaim_copy(this);
  if (turn.what == What::Recompute)
    return hand_over(position, recompute_for(self, *task, turn.values, position));
  RecomputedValues values(TaskKey{});
  recompute(self, values, position);
  return hand_over(position, values.take(position));
}

Value recompute_for(const c10::intrusive_ptr<Frame>& frame, const Task& task,
                    const std::shared_ptr<RecomputedValues>& values, int64_t position) {
  TaskKey key = task.shared ? task.shared->key() : task.graph;
  ValuesByTask& all = frame->values();
  try {
    if (task.shared == nullptr) notify_at_task_end(task.graph, WeakFrame(frame));
    if (position < 0) values->beside = streams_ahead(*frame);
    recompute(frame, *values);
    if (task.shared != nullptr && !task.shared->add(frame, values->num_bytes())) {
      // Too large for the cache: the values are held until this backward has read them.
      notify_at_task_end(task.graph, WeakFrame(frame));
      key = task.graph;
    }
  } catch (...) {
    all.failed(values);
    throw;
  }
  Value value = all.filled(frame->region(), values, key, task, position);
  if (position >= 0) look_ahead(*frame, task);
  return value;
}

// Returns the tensor to backward. Throws if it was changed in place after the recompute saved it,
// as plain autograd does (Rule 10).
at::Tensor Frame::hand_over(int64_t position, Value&& value) {
  if (is_recording() && recorded_ != nullptr)
    recorded_->slot_event(recording::SlotEvent::Read, position, {});
  if (seam::version_of(value.tensor) != value.version && !is_planted(Fault::SavedVersion))
    throw_changed_value(region_, position, slots_.identity_of(position), value.tensor,
                        value.version);
  if (value.alias.defined() && storage_of(value.alias) != storage_of(value.tensor))
    value.tensor = std::move(value.alias);
  if (value.ready) value.ready->wait_before_use(value.tensor);
  // A backward inside a selective region receives this tensor. The region must recognize it when an
  // operator reads it.
  detail::visit_regions([&](detail::RegionScope& scope) {
    if (detail::ReadWatcher* const watcher = scope.reads())
      watcher->value_was_handed_over(value.tensor, region_.info.id, position);
  });
  return std::move(value.tensor);
}

}  // namespace remat
