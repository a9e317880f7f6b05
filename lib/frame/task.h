#pragma once
// The identity and the end of the backward pass that runs on this thread.

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "hooks/pack/slot.h"

namespace remat {

class SharedRecomputes;

/// Names what a recompute is for: one backward call, or several that share it.
struct TaskKey {
  enum class Kind : uint8_t { Graph, Group, Cache };
  Kind kind = Kind::Graph;
  int64_t id = -1;  ///< of an engine graph task, or of a guard
  bool operator==(const TaskKey&) const = default;
};

/// The backward that runs on a thread.
struct Task {
  TaskKey graph;  ///< of the engine
  /// The backward shares recomputes with the calls in it; null: with none.
  std::shared_ptr<SharedRecomputes> shared;
};

/// The backward that runs on this thread, if one does.
std::optional<Task> current_task();

/// An owner of slots whose recomputed values go when a task ends.
class TaskMember : public SlotOwner {
 public:
  virtual void end_task(const TaskKey& task) noexcept = 0;
};

/// Tells the member when the current graph task ends, by success or by error, on the thread that
/// ends it. The member is held weakly.
void notify_at_task_end(const TaskKey& task, c10::weak_intrusive_ptr<TaskMember> member);

}  // namespace remat
