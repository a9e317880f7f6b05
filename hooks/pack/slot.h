#pragma once
// The interface that a saved-tensor hook needs from the owner of the tensor.

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>

#include "hooks/pack/inspection.h"

namespace remat {

/// The owner of slots for the tensors that autograd saves; it can produce their contents later. A
/// hook that holds a slot keeps its owner alive.
class SlotOwner : public c10::intrusive_ptr_target {
 public:
  /// Records a saved tensor without keeping it, and returns its position.
  virtual int64_t add_slot(const at::Tensor& saved) = 0;
  /// Returns the contents of a slot; may run user code.
  virtual at::Tensor read_slot(int64_t position) = 0;
  /// Releases a slot that will not be read again.
  virtual void drop_slot(int64_t position) noexcept = 0;
  /// Returns a description of the saved tensor; computes nothing.
  virtual HeldInfo describe_slot(int64_t position) = 0;
};

/// A saved tensor that a recompute's graph keeps for its own reads.
struct Kept {
  at::Tensor tensor;
  uint32_t version = 0;  ///< version at the save
  int64_t position = -1;
};

/// Receives the tensors that autograd saves while a region is recomputed.
class SlotFiller {
 public:
  virtual ~SlotFiller() = default;
  /// Takes the next saved tensor, and sets the tensor that the recomputed graph itself keeps.
  /// Returns false if the recompute ends here, by `stop`.
  virtual bool fill(const at::Tensor& saved, Kept& kept) = 0;
  /// Throws, as plain autograd does, since the recomputed graph reads a tensor that was changed in
  /// place after its save.
  [[noreturn]] virtual void refuse_changed(const Kept& kept) const = 0;
  /// Throws. The caller's stack frames should have no cleanup: each such frame costs about as much
  /// as a small operator.
  [[noreturn]] virtual void stop() = 0;
  /// Called when the function reads a saved tensor of its own graph, outside of a backward. May end
  /// the recompute.
  virtual void stop_before_read() = 0;
  /// Called where a region begins. Returns whether its caller will end the recompute, without
  /// `stop`.
  virtual bool stop_at_region() = 0;

  /// Returns the innermost filler whose function runs on this thread, or null.
  static SlotFiller*& running() {
    thread_local SlotFiller* filler = nullptr;
    return filler;
  }
};

}  // namespace remat
