#pragma once
// Copies of tensors that stay views of each other, as the tensors are.

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

#include "lib/base/place_index.h"

namespace remat {

/// Each storage is copied once, however many tensors lie in it.
class InputCopies {
 public:
  enum class How {
    AtOnce,
    Lazily,  ///< at once where a lazy copy cannot be made
  };
  explicit InputCopies(How how) : how_(how) {}

  /// A copy of this tensor will be asked for. If those of a storage have less than half of it, only
  /// the range is copied in which they lie; else all of it.
  void expect(const at::Tensor& tensor);
  /// The copy has the same sizes, strides and keys, no history, and a version counter of its own
  /// (one for each storage). Undefined if there is nothing to be copied: the tensor has more
  /// elements than its storage; or, unless `AtOnce`, it has no data or is one of inference mode.
  at::Tensor copy_of(const at::Tensor& tensor);

 private:
  struct Range {  // in a storage [bytes]
    int64_t begin = 0, end = 0;
  };
  struct Expected {
    const c10::StorageImpl* storage;
    Range range;
  };
  struct Copy {
    const c10::StorageImpl* from;
    c10::Storage storage;
    int64_t begin;
    c10::VariableVersion counter;
  };
  static Range range_of(const at::Tensor& tensor);
  const Copy& of(const at::Tensor& tensor);
  Expected* expected_of(const c10::StorageImpl* storage);

  const How how_;
  c10::SmallVector<Expected, 2> expected_;
  c10::SmallVector<Copy, 2> copies_;
  PlaceIndex expected_places_, copy_places_;
};

}  // namespace remat
