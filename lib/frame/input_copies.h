#pragma once
// Copies tensors so that the copies of views of one storage are views of one storage, too.

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

#include "lib/base/place_index.h"

namespace remat {

/// Copies each storage once, however many tensors lie in it.
class InputCopies {
 public:
  enum class How {
    AtOnce,
    Lazily,  ///< at once where a lazy copy cannot be made
  };
  explicit InputCopies(How how) : how_(how) {}

  /// Announces a later copy_of() of this tensor. If the announced tensors of a storage cover less
  /// than half of it, only the range that they cover is copied; otherwise all of it.
  void expect(const at::Tensor& tensor);
  /// Returns a copy with the same sizes, strides and keys, no history, and a version counter of its
  /// own (one for each storage). Returns an undefined tensor if nothing can be copied: the tensor
  /// has more elements than its storage or, unless `AtOnce`, has no data or is an inference tensor.
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
