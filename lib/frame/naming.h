#pragma once
// What errors call a region, its tensors, and the operators that saved them.

#include <string>

#include "lib/frame/region.h"
#include "lib/frame/slot.h"
#include "lib/tensor/capture.h"

namespace remat {

/// `region "block 3" (frame 7, options at train.cpp:42)`, as far as that is known.
std::string title(const Region& region);

/// "parameter 'conv1.weight' of UNetBlock", if the region knows a module that has it; else empty.
std::string name_of(const Region& region, const TensorIdentity& tensor);
/// Whether it knows any module.
bool knows_modules(const Region& region);

/// What an error remembers of a slot, to name it when all has unwound.
struct SlotIdentity {
  TensorIdentity tensor{};
  /// As the slot's; 0 where that says nothing.
  uint64_t operator_number = 0;
  bool is_inner_input = false;  ///< as the slot's

  SlotIdentity() = default;
  explicit SlotIdentity(const Slot& slot)
      : tensor(TensorIdentity::of(slot.provenance)),
        operator_number(slot.is_inner_input ? 0 : slot.operator_number),
        is_inner_input(slot.is_inner_input) {}
};
/// The node that saved a tensor in forward, such as "ConvolutionBackward0", if the backward that
/// runs here leads to it; else empty.
std::string saver_of(const SlotIdentity& slot);

}  // namespace remat
