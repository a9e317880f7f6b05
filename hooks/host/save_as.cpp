#include "hooks/host/save_as.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "lib/seam/on_stream.h"

namespace remat {

namespace {

/// Returns the largest finite number of a type; 0 for types to which saved tensors cannot be
/// rounded (Float8_e8m0fnu has no sign).
double largest_of(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kHalf:
    case c10::kComplexHalf:
      return std::numeric_limits<c10::Half>::max();
    case c10::kBFloat16:
      return std::numeric_limits<c10::BFloat16>::max();
    case c10::kFloat:
    case c10::kComplexFloat:
      return std::numeric_limits<float>::max();
    case c10::kDouble:
    case c10::kComplexDouble:
      return std::numeric_limits<double>::max();
    case c10::kFloat8_e5m2:
      return std::numeric_limits<c10::Float8_e5m2>::max();
    case c10::kFloat8_e4m3fn:
      return std::numeric_limits<c10::Float8_e4m3fn>::max();
    case c10::kFloat8_e5m2fnuz:
      return std::numeric_limits<c10::Float8_e5m2fnuz>::max();
    case c10::kFloat8_e4m3fnuz:
      return std::numeric_limits<c10::Float8_e4m3fnuz>::max();
    default:
      return 0;
  }
}

/// Returns whether every number of `flat` is finite and small enough.
bool fits(const at::Tensor& flat, double largest) {
  const auto [least, greatest] = at::aminmax(flat);
  const double bound = std::max(std::abs(least.item<double>()), std::abs(greatest.item<double>()));
  return bound <= largest;  // false if there is a NaN
}

/// Returns whether every finite number is small enough, and infinite and NaN elements are the same
/// after both conversions. (Some types have no infinity, and some conversions saturate at the
/// largest number.)
bool survives(const at::Tensor& flat, const at::Tensor& back, double largest) {
  const at::Tensor finite = at::isfinite(flat);
  return flat.abs().le(largest).logical_or(finite.logical_not()).all().item<bool>() &&
         finite.equal(at::isfinite(back)) && at::isnan(flat).equal(at::isnan(back));
}

class AsNarrow final : public StoredContents {
 public:
  AsNarrow(at::Tensor narrow, c10::ScalarType dtype) : narrow_(std::move(narrow)), dtype_(dtype) {}
  at::Tensor finish_load() override {
    if (!narrow_.is_cpu())  // the stream of the read may differ from that of the save
      c10::impl::VirtualGuardImpl(narrow_.device().type())
          .recordDataPtrOnStream(narrow_.storage().data_ptr(), current_stream(narrow_.device()));
    return narrow_.to(dtype_);
  }

 private:
  const at::Tensor narrow_;
  const c10::ScalarType dtype_;
};

}  // namespace

SaveAs::SaveAs(c10::ScalarType dtype) : dtype_(dtype) {
  TORCH_CHECK_VALUE(largest_of(dtype) > 0, "remat::SaveAsGuard: the type ", dtype,
                    " was requested.\n"
                    "Cause: saved tensors can be rounded to floating-point and complex types "
                    "with a sign only.\n"
                    "Hint: set such a type, for example at::kBFloat16.");
}

bool SaveAs::takes(const at::Tensor& tensor) const {
  const auto from = tensor.scalar_type();
  return largest_of(from) > 0 && c10::isComplexType(from) == c10::isComplexType(dtype_) &&
         c10::elementSize(dtype_) < c10::elementSize(from);
}

std::shared_ptr<StoredContents> SaveAs::begin_store(const at::Tensor& flat) {
  const auto numbers = [](const at::Tensor& t) { return t.is_complex() ? at::view_as_real(t) : t; };
  const double largest = largest_of(dtype_);
  const at::Tensor narrow = flat.to(dtype_);
  if (!fits(numbers(flat), largest) &&
      !survives(numbers(flat), numbers(narrow.to(flat.scalar_type())), largest))
    return nullptr;
  return std::make_shared<AsNarrow>(narrow, flat.scalar_type());
}

}  // namespace remat
