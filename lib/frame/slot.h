#pragma once
// One slot of a frame: what is remembered of a tensor that autograd saved in the region.

#include <cstddef>
#include <cstdint>

#include "lib/tensor/capture.h"
#include "lib/tensor/tensor_metadata.h"

namespace remat {

struct Slot {
  /// Tensors saved by one operator share it (`at::sequence_number::peek()` at the save).
  uint64_t operator_number = 0;
  TensorMetadata metadata;
  [[no_unique_address]] Provenance provenance;  // the flags fill its last word
  bool requires_grad : 1 = false;
  /// It requires grad, apart from what a view made under no-grad claims.
  bool has_edge : 1 = false;
  /// The operator that saved it saved the slot before, too, with no backward or pinned value
  /// between the two.
  bool follows : 1 = false;
  /// The slot stands for an input of a region inside; such a tensor is complete when it is saved.
  bool is_inner_input : 1 = false;
  /// The operator may write this tensor, or another that its operator saves, after it was saved: a
  /// recompute that ends here lets the operator finish (Rule 5).
  bool finish_operator : 1 = true;
  /// The operator is a C++ Function that saves its own output, here or in another slot of that
  /// operator.
  bool saves_own_output : 1 = false;
  /// Its history is older than the region.
  bool is_older : 1 = false;
  /// Some saved variable still refers to the slot. A byte of its own: others are read without the
  /// lock.
  bool is_alive = true;

  bool is_same_operator(const Slot& other) const {
    return operator_number == other.operator_number && !is_inner_input && !other.is_inner_input;
  }
};

/// Converts a position to the index of a slot in its frame.
inline std::size_t at_position(int64_t position) { return static_cast<std::size_t>(position); }

}  // namespace remat
