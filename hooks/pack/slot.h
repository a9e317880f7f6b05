#pragma once
// What a saved-tensor hook needs from the owner of the tensor.

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>

#include "hooks/pack/inspection.h"

namespace remat {

/// Gives out slots for the tensors that autograd saves and can produce their contents later.
/// A hook that holds a slot keeps its owner alive.
class SlotOwner : public c10::intrusive_ptr_target {
 public:
  /// Takes note of a saved tensor without keeping it; returns its position.
  virtual int64_t add_slot(const at::Tensor& saved) = 0;
  /// The contents of a slot; may run user code.
  virtual at::Tensor read_slot(int64_t position) = 0;
  /// Nothing will read the slot again.
  virtual void drop_slot(int64_t position) noexcept = 0;
  /// What was saved there; computes nothing.
  virtual HeldInfo describe_slot(int64_t position) = 0;
};

/// What the graph that a recompute makes keeps of a tensor that was saved, for its own reads.
struct Kept {
  at::Tensor tensor;
  uint32_t version = 0;  ///< when it was saved
  int64_t position = -1;
};

/// Receives the tensors that autograd saves while a region is recomputed.
class SlotFiller {
 public:
  virtual ~SlotFiller() = default;
  /// Takes the next saved tensor, and sets what the recomputed graph itself shall keep of it.
  /// False: the recompute ends here, by `stop`.
  virtual bool fill(const at::Tensor& saved, Kept& kept) = 0;
  /// The recomputed graph reads what was changed in place after it was saved: throws, as plain
  /// autograd does.
  [[noreturn]] virtual void refuse_changed(const Kept& kept) const = 0;
  /// Throws. Called with nothing to clean up on the way: each such frame costs about as much as a
  /// small operator.
  [[noreturn]] virtual void stop() = 0;
  /// The function reads what its own graph saved, outside of a backward. May end the recompute.
  virtual void stop_before_read() = 0;
  /// Where a region begins: whether whoever begins it will end the recompute, without `stop`.
  virtual bool stop_at_region() = 0;

  /// The innermost whose function runs on this thread; null if there is none.
  static SlotFiller*& running() {
    thread_local SlotFiller* filler = nullptr;
    return filler;
  }
};

}  // namespace remat
