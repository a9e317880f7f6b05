#include "lib/frame/task.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "lib/frame/frame.h"
#include "lib/scope/hook_stack.h"
#include "lib/seam/engine.h"

namespace remat {

namespace {

using WeakFrame = c10::weak_intrusive_ptr<Frame>;

/// Note [The end of a task]
/// LibTorch calls final callbacks on success only, but destroys them with the task in both cases.
/// So the list of frames is owned by such a callback: it is emptied when called, or when destroyed.
/// One per thread and task.
class FramesOfTask {
 public:
  explicit FramesOfTask(TaskKey task) : task_(task) {}
  ~FramesOfTask() { end(); }
  FramesOfTask(const FramesOfTask&) = delete;
  FramesOfTask& operator=(const FramesOfTask&) = delete;

  const TaskKey& task() const { return task_; }

  void add(const c10::intrusive_ptr<Frame>& frame) {
    // Frames die while the task runs; forgetting them at every doubling keeps the list short.
    if (frames_.size() >= next_sweep_) {
      std::erase_if(frames_, [](const WeakFrame& each) { return each.expired(); });
      next_sweep_ = std::max<std::size_t>(64, 2 * frames_.size());
    }
    frames_.emplace_back(frame);
  }

  void end() noexcept {
    for (const WeakFrame& each : std::exchange(frames_, {}))
      if (const auto frame = each.lock()) frame->end_task(task_);
  }

 private:
  TaskKey task_;
  std::vector<WeakFrame> frames_;
  std::size_t next_sweep_ = 64;
};

}  // namespace

std::optional<Task> current_task() {
  const int64_t id = seam::graph_task_id();
  if (id < 0) return std::nullopt;
  const detail::StackView around;
  const detail::Scope* sharing = around.innermost(detail::Ability::Group);
  if (sharing == nullptr) sharing = around.innermost(detail::Ability::Cache);
  return Task{{TaskKey::Kind::Graph, id}, sharing == nullptr ? nullptr : sharing->backwards()};
}

void notify_at_task_end(const TaskKey& task, const c10::intrusive_ptr<Frame>& frame) {
  // SharedRecomputes nest, so a thread may serve several tasks in turn; an ended one is found expired.
  thread_local std::vector<std::weak_ptr<FramesOfTask>> tasks;
  std::shared_ptr<FramesOfTask> found = tasks.empty() ? nullptr : tasks.back().lock();
  if (found != nullptr && found->task() == task) return found->add(frame);
  found.reset();
  std::erase_if(tasks, [&](const std::weak_ptr<FramesOfTask>& each) {
    const auto frames = each.lock();
    if (frames != nullptr && frames->task() == task) found = frames;
    return frames == nullptr;
  });
  if (found == nullptr) {
    found = std::make_shared<FramesOfTask>(task);
    seam::at_end_of_graph_task([found] { found->end(); });
    tasks.emplace_back(found);
  }
  found->add(frame);
}

}  // namespace remat
