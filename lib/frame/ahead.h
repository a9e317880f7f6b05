#pragma once
// Recomputes ahead: regions that a handle or an earlier region of the same backward prepares.
//
// Note [Recomputing ahead]
// Prepared values are ordinary values of a frame (ValuesByTask). A handle makes them for no task:
// the first task that reads one takes all of them over, with the duty to drop them at its end.
// CheckpointOptions::prepare_ahead makes them for the task that runs. Either way the first read by
// a task checks that nothing has changed since, as for a cache, and looks ahead in turn.
// Regions with that option form a chain, each with the one before it on its thread. A task prepares
// a region of the chain only if the engine will run the node that made the region's result.

#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <optional>

#include "lib/frame/frame.h"
#include "remat/region_handle.h"

namespace remat {

/// Sets and reads the frame of a handle.
struct HandleAccess {
  static void set(RegionHandle& handle, const c10::intrusive_ptr<Frame>& frame);
  static c10::intrusive_ptr<Frame> frame_of(const RegionHandle& handle);
};

/// Adds a region whose function has returned to this thread's chain, and sets its handle. Does
/// nothing in a recompute.
void link(const c10::intrusive_ptr<Frame>& frame,
          c10::function_ref<void(TensorVisitor)> visit_result);

/// Recomputes the regions that the task reads after this one, as many as the region's option says.
void look_ahead(const Frame& frame, const Task& task);

/// Gives the prepared values of a region to the task, group or cache that reads them first
/// (Rule 4), and looks ahead.
void take_over(const c10::intrusive_ptr<Frame>& frame, const Task& task);

/// Recomputes a frame for no task, or for the group or cache around.
void prepare(const c10::intrusive_ptr<Frame>& frame);

/// Returns the task to which reads outside of a backward belong while this thread prepares a region
/// for no task: those of the inputs of its recompute. Null otherwise (Rule 8).
std::optional<Task> task_prepared_for();

/// Returns streams of the library's own for a recompute ahead; null if it must stay on forward's.
std::unique_ptr<const StreamsBeside> streams_ahead(Frame& frame);

}  // namespace remat
