#pragma once
// One tensor argument of a region as it waits for recomputes.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <optional>

#include "lib/tensor/tensor_parts.h"

namespace remat {

/// An input is held as autograd would save it: by the hooks around the region, if there are any;
/// else it is kept as it is, or, where only its data are wanted, in parts.
class HeldInput {
 public:
  /// Holds no tensor.
  HeldInput() = default;
  /// Throws what the hooks around throw, and LibTorch's error for inference tensors.
  HeldInput(const at::Tensor& tensor, bool without_history);

  bool has_hooks() const { return saved_ != nullptr; }
  /// It had no hooks.
  void register_hooks(std::unique_ptr<torch::autograd::SavedVariableHooks> hooks);
  /// Returns the tensor, or an alias without its history; may make the region around recompute.
  at::Tensor unpack() const;
  /// Whether each `unpack` builds an alias of its own.
  bool builds_alias() const { return parts_.has_value(); }

 private:
  // One of three.
  std::optional<TensorParts> parts_;
  at::Tensor tensor_;
  std::unique_ptr<torch::autograd::SavedVariable> saved_;  ///< with hooks
};

}  // namespace remat
