#include "lib/frame/ahead.h"

#include <utility>

#include "lib/base/set_while.h"
#include "lib/frame/active_recomputes.h"
#include "lib/frame/recompute.h"
#include "lib/frame/shared_recomputes.h"
#include "remat/scope.h"

namespace remat {

namespace {

using Chain = c10::weak_intrusive_ptr<TaskMember>;

/// The region that this thread linked last.
Chain& last_link() {
  thread_local Chain last{c10::intrusive_ptr<TaskMember>()};
  return last;
}

/// This thread's mark of preparing a region for no task.
bool& is_preparing_ahead() {
  thread_local bool is_on = false;
  return is_on;
}

bool& is_looking_ahead() {
  thread_local bool is_on = false;
  return is_on;
}

c10::intrusive_ptr<Frame> frame_in(c10::intrusive_ptr<c10::intrusive_ptr_target> region) {
  return c10::intrusive_ptr<Frame>::reclaim(static_cast<Frame*>(region.release()));
}
c10::intrusive_ptr<Frame> frame_in(const Chain& link) { return frame_in(link.lock()); }

/// Recomputes a frame ahead of a task's reads, for `owner`, unless values are there.
void recompute_ahead(const c10::intrusive_ptr<Frame>& frame, const Task& task, const Task& owner) {
  const TaskKey& key = owner.shared ? owner.shared->key() : owner.graph;
  if (const auto values = frame->values().begin_ahead(task, key))
    recompute_for(frame, owner, values, -1);
}

}  // namespace

void HandleAccess::set(RegionHandle& handle, const c10::intrusive_ptr<Frame>& frame) {
  handle.region_ = c10::weak_intrusive_ptr<c10::intrusive_ptr_target>(
      c10::intrusive_ptr<c10::intrusive_ptr_target>(frame));
}

c10::intrusive_ptr<Frame> HandleAccess::frame_of(const RegionHandle& handle) {
  return frame_in(handle.region_.lock());
}

void link(const c10::intrusive_ptr<Frame>& frame,
          c10::function_ref<void(TensorVisitor)> visit_result) {
  AheadLink& own = *frame->region().extras->ahead;
  const auto handle = std::exchange(own.handle, nullptr);
  if (is_recomputing()) return;
  if (handle != nullptr) HandleAccess::set(*handle, frame);
  if (own.num_regions == 0) return;
  visit_result([&](at::Tensor& tensor) {
    if (tensor.defined() && own.node.is_null()) own.node = seam::NodeMark(tensor.grad_fn());
  });
  own.before = std::exchange(last_link(), Chain(c10::intrusive_ptr<TaskMember>(frame)));
}

void look_ahead(const Frame& frame, const Task& task) {
  const RegionExtras* const extras = frame.region().extras.get();
  if (extras == nullptr || extras->ahead == nullptr || is_looking_ahead()) return;
  // Only the backward itself looks ahead: a recompute that is reading its inputs is not done, and
  // regions inside it would recompute it once more.
  if (is_preparing_recompute()) return;
  const SetWhile looking(is_looking_ahead(), true);
  auto next = frame_in(extras->ahead->before);
  for (int64_t left = extras->ahead->num_regions; left > 0 && next;) {
    const AheadLink& its = *next->region().extras->ahead;
    if (its.node.will_run()) {
      // A cache gets them when the task reads them, and cannot drop them before.
      recompute_ahead(next, task, {task.graph, nullptr});
      --left;
    }
    next = frame_in(its.before);
  }
}

void take_over(const c10::intrusive_ptr<Frame>& frame, const Task& task) {
  const c10::weak_intrusive_ptr<TaskMember> member{c10::intrusive_ptr<TaskMember>(frame)};
  if (task.shared == nullptr) {
    notify_at_task_end(task.graph, member);
  } else if (!task.shared->add(frame, frame->values().num_bytes(task.shared->key()))) {
    frame->values().leave_cache(task);
    notify_at_task_end(task.graph, member);
  }
  look_ahead(*frame, task);
}

void prepare(const c10::intrusive_ptr<Frame>& frame) {
  const SetWhile preparing(is_preparing_ahead(), true);
  const Task owner{prepared, SharedRecomputes::around()};
  recompute_ahead(frame, owner, owner);
}

std::optional<Task> task_prepared_for() {
  if (!is_preparing_ahead() || !is_preparing_recompute()) return std::nullopt;
  return Task{prepared, SharedRecomputes::around()};
}

std::unique_ptr<const StreamsBeside> streams_ahead(Frame& frame) {
  // A provider or an observer queues its work on the streams that are current, and other code may
  // need that work next.
  if (const UserState* const state = frame.surroundings().user_state())
    if (!state->registered().providers.empty() || !state->registered().observers.empty())
      return nullptr;
  return StreamsBeside::of(frame.surroundings().streams());
}

}  // namespace remat
