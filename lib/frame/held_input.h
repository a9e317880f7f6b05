#pragma once
// One tensor argument of a region, held for recomputes.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <optional>

#include "lib/tensor/tensor_parts.h"

namespace remat {

/// Holds an input as autograd would save it: by the hooks around the region, if there are any.
/// Otherwise the tensor itself is held, or only its parts if it is wanted without its history.
class HeldInput {
 public:
  /// Holds no tensor.
  HeldInput() = default;
  /// Throws errors of the hooks around, and LibTorch's error for inference tensors.
  HeldInput(const at::Tensor& tensor, bool without_history);

  /// Returns whether hooks hold the input: those around the region, or ours.
  bool has_hooks() const { return saved_ != nullptr; }
  /// Saves the tensor anew through our own hooks. Requires an input without hooks.
  void offload(std::unique_ptr<torch::autograd::SavedVariableHooks> hooks);
  bool is_offloaded() const { return is_offloaded_; }
  /// Returns the tensor, or an alias without its history. May make the region around recompute.
  at::Tensor unpack() const;
  /// Returns whether each `unpack` builds an alias of its own.
  bool builds_alias() const { return parts_.has_value(); }

 private:
  // At most one of the three is set.
  std::optional<TensorParts> parts_;
  at::Tensor tensor_;
  std::unique_ptr<torch::autograd::SavedVariable> saved_;  ///< with hooks
  bool is_offloaded_ = false;
};

}  // namespace remat
