#pragma once
// The identity and the end of the backward that runs on this thread.

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "hooks/pack/slot.h"

namespace remat {

class SharedRecomputes;

/// Names the purpose of a recompute: one backward call, or several that share it.
struct TaskKey {
  enum class Kind : uint8_t { Graph, Group, Cache, Prepared };
  Kind kind = Kind::Graph;
  int64_t id = -1;  ///< of an engine graph task, or of a guard
  bool operator==(const TaskKey&) const = default;
};

/// Names the values that no task has read: Note [Recomputing ahead].
inline constexpr TaskKey prepared{TaskKey::Kind::Prepared, -2};

/// The backward that runs on a thread.
struct Task {
  TaskKey graph;  ///< the engine's graph task
  /// The calls with which the backward shares recomputes, or null.
  std::shared_ptr<SharedRecomputes> shared;
};

/// Returns the backward that runs on this thread, if any.
std::optional<Task> current_task();

/// An owner of slots whose recomputed values are released when a task ends.
class TaskMember : public SlotOwner {
 public:
  virtual void end_task(const TaskKey& task) noexcept = 0;
};

/// Calls the member's end_task() when the current graph task ends, by success or by error, on the
/// thread that ends it. The member is held weakly.
void notify_at_task_end(const TaskKey& task, c10::weak_intrusive_ptr<TaskMember> member);

}  // namespace remat
