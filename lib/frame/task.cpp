#include "lib/frame/task.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "lib/frame/shared_recomputes.h"
#include "lib/scope/hook_stack.h"
#include "lib/seam/engine.h"

namespace remat {

namespace {

using WeakMember = c10::weak_intrusive_ptr<TaskMember>;

/// Note [The end of a task]
/// LibTorch calls final callbacks on success only, but destroys them with the task in both cases.
/// So the list of members is owned by such a callback: it is emptied when called, or when
/// destroyed. One per thread and task.
class MembersOfTask {
 public:
  explicit MembersOfTask(TaskKey task) : task_(task) {}
  ~MembersOfTask() { end(); }
  MembersOfTask& operator=(MembersOfTask&&) = delete;

  const TaskKey& task() const { return task_; }

  void add(WeakMember member) {
    // Members die while the task runs; forgetting them at every doubling keeps the list short.
    if (members_.size() >= next_sweep_) {
      std::erase_if(members_, [](const WeakMember& each) { return each.expired(); });
      next_sweep_ = std::max<std::size_t>(64, 2 * members_.size());
    }
    members_.push_back(std::move(member));
  }

  void end() noexcept {
    for (const WeakMember& each : std::exchange(members_, {}))
      if (const auto member = each.lock()) member->end_task(task_);
  }

 private:
  TaskKey task_;
  std::vector<WeakMember> members_;
  std::size_t next_sweep_ = 64;
};

}  // namespace

std::optional<Task> current_task() {
  const int64_t id = seam::graph_task_id();
  if (id < 0) return std::nullopt;
  return Task{{TaskKey::Kind::Graph, id}, SharedRecomputes::around()};
}

void notify_at_task_end(const TaskKey& task, WeakMember member) {
  if (task == prepared) return;
  // Backwards nest, so a thread may serve several tasks in turn; an ended one is found expired.
  thread_local std::vector<std::weak_ptr<MembersOfTask>> tasks;
  std::shared_ptr<MembersOfTask> found = tasks.empty() ? nullptr : tasks.back().lock();
  if (found != nullptr && found->task() == task) return found->add(std::move(member));
  found.reset();
  std::erase_if(tasks, [&](const std::weak_ptr<MembersOfTask>& each) {
    const auto members = each.lock();
    if (members != nullptr && members->task() == task) found = members;
    return members == nullptr;
  });
  if (found == nullptr) {
    found = std::make_shared<MembersOfTask>(task);
    seam::at_end_of_graph_task([found] { found->end(); });
    tasks.emplace_back(found);
  }
  found->add(std::move(member));
}

}  // namespace remat
