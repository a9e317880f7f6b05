#pragma once
// The identity and the end of the backward pass that runs on this thread.

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <optional>

namespace remat {

class Frame;

/// Names one backward pass (an engine graph task).
struct TaskKey {
  int64_t id = -1;
  bool operator==(const TaskKey&) const = default;
};

/// The backward that runs on this thread, if one does.
std::optional<TaskKey> current_task();

/// Tells the frame when the current task ends, by success or by error: `Frame::end_task`, on the
/// thread that ends it. The frame is held weakly.
void notify_at_task_end(const TaskKey& task, const c10::intrusive_ptr<Frame>& frame);

}  // namespace remat
