#pragma once
// A stage of a chain on its own: given its input, and the gradient of its output, as the stages
// around it would.

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

/// Backward on an accelerator ends before the engine's thread of the device has let go of the last
/// node's tensors; it has when it has run another one.
void wait_for_engine(c10::Device device);

/// [bytes] of its storage; 0 elsewhere than on the device.
int64_t storage_bytes(const at::Tensor& tensor, c10::Device device);
/// [bytes] Of a difference of counts, in which other threads may have freed more than the stage
/// holds.
constexpr int64_t at_least_none(int64_t bytes) { return bytes > 0 ? bytes : 0; }
/// By which its storage is known again; null for a tensor without one.
const c10::StorageImpl* identity_of(const at::Tensor& tensor);
/// [bytes] A gradient has the shape of its tensor and a storage of its own.
int64_t gradient_bytes(const at::Tensor& tensor, c10::Device device);

/// The node stands for the stage before: its gradient arrives there and dies, as it would in that.
/// A leaf would keep it, or copy it first.
at::Tensor input_from(const at::Tensor& value, bool requires_grad);

/// A backward of ones through a stage, as in a chain: the stage behind hands over its gradient and
/// keeps nothing. That of the last one is the caller's, who holds it to the end.
class BackwardOfStage {
 public:
  /// What it begins with; made before bytes are counted.
  struct Start {
    at::Tensor root = at::zeros({}), gradient = at::ones({});
  };
  BackwardOfStage(const at::Tensor& output, const Start& start, bool is_last);
  void run() const { start_.root.backward(start_.gradient); }

 private:
  const Start& start_;
  at::Tensor callers_;
};

/// While alive, the leaves below a result have gradients of zeros and no hooks: no optimizer
/// steps in their backward. They get back what they had.
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

/// While alive, regions around do not see what this thread computes.
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
