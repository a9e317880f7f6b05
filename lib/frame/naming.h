#pragma once
// Names that errors use for a region, its tensors, and the operators that saved them.

#include <string>

#include "lib/frame/region.h"
#include "lib/frame/slot.h"
#include "lib/tensor/capture.h"

namespace remat {

/// Returns `region "block 3" (frame 7, options at train.cpp:42)`, as far as that is known.
std::string title(const Region& region);

/// Returns "parameter 'conv1.weight' of UNetBlock" if the region knows a module that has the
/// tensor; otherwise an empty string.
std::string name_of(const Region& region, const TensorIdentity& tensor);
/// Returns whether the region knows any module.
bool knows_modules(const Region& region);

/// Data of a slot from which an error names it when everything has unwound.
struct SlotIdentity {
  TensorIdentity tensor{};
  /// The slot's; 0 for inner inputs, where it has no meaning.
  uint64_t operator_number = 0;
  bool is_inner_input = false;  ///< as the slot's

  SlotIdentity() = default;
  explicit SlotIdentity(const Slot& slot)
      : tensor(TensorIdentity::of(slot.provenance)),
        operator_number(slot.is_inner_input ? 0 : slot.operator_number),
        is_inner_input(slot.is_inner_input) {}
};
/// Returns the node that saved a tensor in forward, such as "ConvolutionBackward0", if the backward
/// that runs here leads to it; otherwise an empty string.
std::string saver_of(const SlotIdentity& slot);

}  // namespace remat
