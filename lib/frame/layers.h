#pragma once
// Services of higher layers, each of which may be absent from a build.
//
// Note [Layers]
// The core (lib/base to lib/entry, and hooks/pack) links alone. A higher layer registers its
// service here when the library is loaded. An option whose layer is absent is `Unsupported`.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "lib/frame/recorded_frame.h"
#include "lib/tensor/capture.h"

namespace remat {

class Frame;
class Policy;

struct Layers {
  /// Returns hooks that save an input of a region elsewhere; null if it stays (lib/move).
  std::unique_ptr<torch::autograd::SavedVariableHooks> (*offload_input)(
      const at::Tensor& input, std::optional<int64_t> prefetch_depth) = nullptr;
  /// Gives a frame a keeper that follows the policy (lib/selective).
  void (*keep_by_policy)(Frame& frame, const Policy& policy) = nullptr;
  /// Runs an operator under a dispatch mode (lib/selective; in a byte budget lib/budget).
  void (*run_operator)(const c10::OperatorHandle& op, torch::jit::Stack& stack) = nullptr;
  void (*run_in_budget)(const c10::OperatorHandle& op, torch::jit::Stack& stack) = nullptr;
  /// Begins the record of a region, whose inputs are saved (lib/observe). The region outlives the
  /// record. `is_moved`: whether hooks have moved an input with the storage.
  std::unique_ptr<RecordedFrame> (*record)(
      const RegionInfo& region, const StorageSet& inputs,
      c10::function_ref<bool(const c10::StorageImpl&)> is_moved) = nullptr;
};

inline constinit Layers layers;

}  // namespace remat
