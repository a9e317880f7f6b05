#pragma once
// The identity and the end of the backward pass that runs on this thread.

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <optional>

#include "lib/frame/task_key.h"

namespace remat {

class Frame;

class SharedRecomputes;

/// The backward that runs on a thread.
struct Task {
  TaskKey graph;  ///< of the engine
  /// The backward calls it shares recomputes with; null: none.
  std::shared_ptr<SharedRecomputes> shared;
};

/// The backward that runs on this thread, if one does.
std::optional<Task> current_task();

/// Tells the frame when the current graph task ends, by success or by error: `Frame::end_task`, on the
/// thread that ends it. The frame is held weakly.
void notify_at_task_end(const TaskKey& task, const c10::intrusive_ptr<Frame>& frame);

}  // namespace remat
