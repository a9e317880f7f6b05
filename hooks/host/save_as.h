#pragma once
// A place that stores saved floating-point tensors in a narrower type.

#include <c10/core/ScalarType.h>

#include "remat/place.h"

namespace remat {

class SaveAs final : public Place {
 public:
  /// Throws c10::ValueError for a type to which numbers cannot be rounded.
  explicit SaveAs(c10::ScalarType dtype);
  /// Returns whether both types are real or both are complex, and the new type is narrower.
  bool takes(const at::Tensor& tensor) const override;
  bool stores_bytes() const override { return false; }
  /// Returns null if a finite number would become infinite or NaN.
  std::shared_ptr<StoredContents> begin_store(const at::Tensor& flat) override;

 private:
  const c10::ScalarType dtype_;
};

}  // namespace remat
