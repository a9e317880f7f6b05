#pragma once
// Undoes hooks and flags that a recompute sets on tensors from outside its region.
//
// Note [Tensors from outside]
// A function may register a hook on a captured tensor, or on a leaf that is its argument, or change
// whether one requires grad. Forward has done so, and plain execution would do it once. A recompute
// must not do it again, nor leave it half done where it is stopped:
//   register_hook      Forward's hooks are noted, in order. A recompute that reaches the same
//                      tensor gets the handle of forward's hook and registers nothing. Any other
//                      hook that it registers is removed when it ends.
//   requires_grad_     Is undone when the recompute ends.
//   set_requires_grad, hooks put on a node by hand
//                      Are not seen as they happen. On known tensors (those that the region saved,
//                      and the leaves among its arguments) they are undone when the recompute ends.
//                      A replaced post-accumulate hook is an error.

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "lib/seam/autograd_meta.h"
#include "lib/tensor/capture.h"

namespace remat {

struct Region;

/// The state of tensors from outside when a recompute begins, which is restored when it ends. One
/// thread.
class OutsideTensors {
 public:
  ~OutsideTensors() { put_back(); }
  OutsideTensors& operator=(OutsideTensors&&) = delete;

  /// Adds a tensor that is known from forward, and notes its present state.
  void add(at::Tensor known);
  /// Notes the flag of a tensor on which `requires_grad_` is about to be called.
  void note_requires_grad(const at::TensorBase& tensor);
  /// Notes a hook that the recompute has registered itself.
  void note_hook(const at::TensorBase& tensor, unsigned handle);
  /// Returns how many hooks the recompute has requested on that tensor before, and counts one more.
  std::size_t count_hook(const at::TensorBase& tensor);
  /// Returns whether the recompute has written to a known tensor.
  bool has_written() const;
  /// Restores the tensors. Throws CheckpointError if something cannot be restored.
  void finish(const Region& region);

 private:
  struct Known {
    at::Tensor tensor;
    bool requires_grad;
    uint32_t version;
    seam::HooksByHand hooks;
  };
  void put_back() noexcept;

  c10::SmallVector<Known, 4> known_;
  std::vector<std::pair<WeakTensor, bool>> requires_grad_;
  std::vector<std::pair<WeakTensor, unsigned>> hooks_;
  std::vector<std::pair<WeakTensor, std::size_t>> counts_;
  bool is_over_ = false;
  bool is_lost_ = false;
};

}  // namespace remat
