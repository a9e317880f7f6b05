#pragma once
// The scope of save_region() while its function runs: where the tensors go that autograd saves in
// it.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "lib/frame/frame_scope.h"
#include "lib/selective/in_argument.h"

namespace remat {

// Note [Arguments of save_region]
// A recompute of the region does not run the function, so the tensors that autograd saves in it are
// kept: they pass the hooks around the region. The function's arguments are an exception, since a
// recompute has them when it reaches the call. When the function has returned, and has written to
// no argument, each saved tensor that lies in an argument becomes a slot of the region, as the
// inputs of a region inside do. A recompute fills these slots from its own arguments, in the same
// order. Until then the hook holds the tensor. If the function threw or wrote to an argument, the
// hook goes on holding it.

/// A tensor that autograd saved in the function; shared by its hook.
class SavedInside;

class SaveRegionScope final : public detail::RegionScope {
 public:
  /// `arguments`: those of the function, undefined ones included; empty in a recompute.
  SaveRegionScope(FrameScope& region, std::vector<at::Tensor> arguments);
  ~SaveRegionScope() override;

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override;
  /// Uses enclosing hooks only: the region's own slot would stay empty, since its recomputes do not
  /// run the function.
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks_for(
      detail::HooksAround which) override;
  bool is_own_thread() const override { return true; }

  const std::vector<at::Tensor>& arguments() const { return arguments_; }
  /// Returns whether the function, which has returned, wrote to an argument.
  bool has_written() const;
  /// Makes slots of the saved arguments, and returns their places in the slots' order. Call it when
  /// the scope is popped and the function wrote to no argument.
  std::vector<InArgument> make_slots();
  /// Releases the arguments. Threads may still hold the scope.
  void release() { arguments_.clear(); }

 private:
  friend class SavedInsideHook;
  /// Saves a tensor through the hooks around the region.
  std::unique_ptr<torch::autograd::SavedVariable> save_around(const at::Tensor& saved) const;

  FrameScope& region_;
  std::vector<at::Tensor> arguments_;
  std::vector<uint32_t> versions_;                        // of the arguments, before the call
  std::vector<std::weak_ptr<SavedInside>> in_arguments_;  // in the order of the saves
};

}  // namespace remat
