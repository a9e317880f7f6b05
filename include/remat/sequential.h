#pragma once
// A chain of stages in checkpointed segments.

#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <vector>

#include "remat/checkpoint.h"

namespace remat {

/// How a chain is cut into segments.
enum class Split {
  Torch,    ///< as upstream: equal segments of floor(stages / segments), the last takes the rest
  Balanced  ///< lengths that differ by at most one, longer ones first
};

/// How `checkpoint_sequential` cuts and runs a chain.
struct SequentialOptions {
  /// Options of every segment. A name gets the segment's number behind it; without a name segments
  /// are called "stages 0 to 3". `InputMode::Default` is `CopyOnWrite` here, so that a segment may
  /// begin with an in-place activation.
  CheckpointOptions checkpoint{.location = {}};
  Split split = Split::Torch;  ///< how the chain is cut
  /// The last segment runs plainly, as upstream: its tensors are needed at once in backward.
  bool checkpoint_last = false;
};

/// Runs the stages one after the other, each but the last segment as one region.
/// Memory: the segments' inputs, and what the last segment saves; a copy of an input that is
/// written to in place while its original is needed by somebody else (InputMode). Stages are copied
/// into the regions.
/// Throws `c10::ValueError` for less than one segment, more segments than stages, an empty stage,
/// or one whose result is not a tensor; else what `checkpoint()` throws.
/// Source: `torch.utils.checkpoint.checkpoint_sequential`.
REMAT_API at::Tensor checkpoint_sequential(const std::vector<Stage>& stages, int64_t segments,
                                           at::Tensor input, const SequentialOptions& options = {});

/// Does the same for the modules of a `Sequential`, which the graph keeps alive: recomputes see
/// their training flags and buffers as forward saw them, and put them back
/// (`CheckpointOptions::buffers`). Stages that are functions do not show their modules: name those
/// in `CheckpointOptions::modules`.
REMAT_API at::Tensor checkpoint_sequential(torch::nn::Sequential stages, int64_t segments,
                                           at::Tensor input, const SequentialOptions& options = {});

}  // namespace remat
