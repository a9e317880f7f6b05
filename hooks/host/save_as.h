#pragma once
// Saved floating-point tensors in a narrower type.

#include <c10/core/ScalarType.h>

#include "remat/place.h"

namespace remat {

class SaveAs final : public Place {
 public:
  /// Throws c10::ValueError for a type that numbers cannot be rounded to.
  explicit SaveAs(c10::ScalarType dtype);
  /// Real numbers for a real type, complex ones for a complex type, and only if the type is
  /// narrower.
  bool takes(const at::Tensor& tensor) const override;
  bool stores_bytes() const override { return false; }
  /// Returns null if a finite number would become infinite or NaN.
  std::shared_ptr<StoredContents> begin_store(const at::Tensor& flat) override;

 private:
  const c10::ScalarType dtype_;
};

}  // namespace remat
