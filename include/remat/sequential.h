#pragma once
// A chain of stages in checkpointed segments.

#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <vector>

#include "remat/checkpoint.h"

namespace remat {

/// The rule that cuts a chain into segments.
enum class Split {
  Torch,  ///< as upstream: segments of floor(stages / segments) stages, the last one takes the rest
  Balanced  ///< lengths that differ by at most one, longer ones first
};

/// Options of `checkpoint_sequential`: how it cuts and runs a chain.
struct SequentialOptions {
  /// Options of every segment. The segment's number is appended to a name; segments without a name
  /// are named "stages 0 to 3". `InputMode::Default` is `CopyOnWrite` here, so that a segment may
  /// begin with an in-place activation.
  CheckpointOptions checkpoint{.location = {}};
  Split split = Split::Torch;  ///< rule that cuts the chain
  /// True if the last segment is a region, too. By default it runs plainly, as upstream, because
  /// backward needs its tensors at once.
  bool checkpoint_last = false;
};

/// Runs the stages one after the other. Each segment but the last one is a region.
/// Memory: the segments' inputs, and the tensors that the last segment saves; also a copy of an
/// input that is written to in place while other code needs the original (InputMode). Stages are
/// copied into the regions.
/// Throws `c10::ValueError` for less than one segment, more segments than stages, an empty stage,
/// or a stage whose result is not a tensor; otherwise the errors of `checkpoint()`.
/// Source: `torch.utils.checkpoint.checkpoint_sequential`.
REMAT_API at::Tensor checkpoint_sequential(const std::vector<Stage>& stages, int64_t segments,
                                           at::Tensor input, const SequentialOptions& options = {});

/// Does the same for the modules of a `Sequential`, which the graph keeps alive. Recomputes see
/// their training flags and buffers as forward did, and restore them afterwards
/// (`CheckpointOptions::buffers`). For stages that are functions, list their modules in
/// `CheckpointOptions::modules`.
REMAT_API at::Tensor checkpoint_sequential(torch::nn::Sequential stages, int64_t segments,
                                           at::Tensor input, const SequentialOptions& options = {});

}  // namespace remat
