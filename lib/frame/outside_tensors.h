#pragma once
// Tensors from outside a region on which its function registers something, and what of that stays.
//
// Note [Tensors from outside]
// A function may register a hook on a captured tensor, or on a leaf that is its argument, or change
// whether one requires grad. Forward has done so, and plain execution would do it once. A recompute
// must not do it again, nor leave it half done where it is stopped:
//   register_hook      forward's are noted, in order. A recompute that comes to the same tensor gets the
//                      handle of forward's and registers nothing. Any other hook that it registers is
//                      taken off when it ends.
//   requires_grad_     is undone when the recompute ends.
//   set_requires_grad, hooks put on a node by hand
//                      are not seen as they happen. Of the tensors that are known, those that the region
//                      saved and the leaves among its arguments, they are undone when it ends; a
//                      post-accumulate hook that was replaced is an error.

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

/// What one recompute finds on tensors from outside when it begins, and puts back when it ends. One
/// thread.
class OutsideTensors {
 public:
  ~OutsideTensors() { put_back(); }
  OutsideTensors& operator=(OutsideTensors&&) = delete;

  /// The tensor is known from forward; what it has now is noted.
  void add(at::Tensor known);
  /// `requires_grad_` is about to be called.
  void note_requires_grad(const at::TensorBase& tensor);
  /// The recompute has registered a hook of its own.
  void note_hook(const at::TensorBase& tensor, unsigned handle);
  /// How many hooks the recompute has asked for on that tensor before.
  std::size_t count_hook(const at::TensorBase& tensor);
  /// Whether the recompute has written to a known tensor.
  bool has_written() const;
  /// Throws CheckpointError if something cannot be put back.
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
