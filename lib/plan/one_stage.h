#pragma once
// A stage of a chain on its own, with the input and the gradient that the stages around would give
// it.

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lib/scope/hook_stack.h"
#include "lib/seam/hooks_off.h"

namespace remat {

/// Waits until the engine's thread of the device has released the last node's tensors. Backward on
/// an accelerator ends before that; the thread has released them once it has run another node.
void wait_for_engine(c10::Device device);

/// Returns the bytes of the tensor's storage; 0 if it is not on the device.
int64_t storage_bytes(const at::Tensor& tensor, c10::Device device);
/// Returns a difference of counts [bytes], at least 0: other threads may have freed more than the
/// stage holds.
constexpr int64_t at_least_none(int64_t bytes) { return bytes > 0 ? bytes : 0; }
/// Returns the address that identifies the tensor's storage; null for a tensor without one.
const c10::StorageImpl* identity_of(const at::Tensor& tensor);
/// Returns the bytes of the tensor's gradient, which has its shape and a storage of its own.
int64_t gradient_bytes(const at::Tensor& tensor, c10::Device device);

/// Returns an input with a node that stands for the stage before: the gradient arrives there and
/// dies, as it would in that stage. A leaf would keep the gradient, or copy it first.
at::Tensor input_from(const at::Tensor& value, bool requires_grad);

/// A backward of ones through a stage, as in a chain: the stage behind passes its gradient on and
/// keeps nothing. The caller owns the gradient of the last stage and holds it to the end.
class BackwardOfStage {
 public:
  /// The tensors that a backward begins with, made before bytes are counted.
  struct Start {
    at::Tensor root = at::zeros({}), gradient = at::ones({});
  };
  BackwardOfStage(const at::Tensor& output, const Start& start, bool is_last);
  void run() const { start_.root.backward(start_.gradient); }

 private:
  const Start& start_;
  at::Tensor callers_;
};

/// Gives the leaves below a result gradients of zeros and no hooks for its lifetime, so that no
/// optimizer steps in their backward. Restores their gradients and hooks at its end.
class GradientScope {
 public:
  explicit GradientScope(const at::Tensor& result);
  ~GradientScope();
  GradientScope& operator=(GradientScope&&) = delete;

 private:
  GradientScope() = default;
  std::vector<std::pair<at::Tensor, at::Tensor>> before_;
  std::vector<std::unique_ptr<seam::HooksOff>> hooks_;
};

/// Hides the work of this thread from regions around it for its lifetime.
/// See Note [Measuring in a region].
class OutsideRegions {
 public:
  OutsideRegions();
  ~OutsideRegions();
  OutsideRegions& operator=(OutsideRegions&&) = delete;

 private:
  std::optional<detail::NoScopes> no_scopes_;
};

}  // namespace remat
