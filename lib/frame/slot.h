#pragma once
// One slot of a frame: the description of a tensor that autograd saved in the region.

#include <cstddef>
#include <cstdint>

#include "lib/tensor/capture.h"
#include "lib/tensor/tensor_metadata.h"

namespace remat {

struct Slot {
  /// Number shared by the tensors that one operator saved (`at::sequence_number::peek()` at the
  /// save).
  uint64_t operator_number = 0;
  TensorMetadata metadata;
  [[no_unique_address]] Provenance provenance;  // the flags fill its last word
  bool requires_grad : 1 = false;
  /// True if it requires grad, except if only a view made under no-grad claims so.
  bool has_edge : 1 = false;
  /// True if the operator also saved the slot before, with no backward or pinned value between the
  /// two.
  bool follows : 1 = false;
  /// True if it is an input of a region inside; such a tensor is complete when it is saved.
  bool is_inner_input : 1 = false;
  /// True if the operator may write this tensor, or another that it saves, after the save. A
  /// recompute that ends here lets the operator finish (Rule 5).
  bool finish_operator : 1 = true;
  /// True if the operator is a C++ Function that saves its own output, in this or another slot.
  bool saves_own_output : 1 = false;
  /// True if its history is older than the region.
  bool is_older : 1 = false;
  /// True if a saved variable still refers to the slot. A byte of its own, since the other flags
  /// are read without the lock.
  bool is_alive = true;

  bool is_same_operator(const Slot& other) const {
    return operator_number == other.operator_number && !is_inner_input && !other.is_inner_input;
  }
};

/// Converts a position to the index of a slot in its frame.
inline std::size_t at_position(int64_t position) { return static_cast<std::size_t>(position); }

}  // namespace remat
