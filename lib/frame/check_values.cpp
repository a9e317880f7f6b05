// DeterminismCheck::Values and CheckpointOptions::fingerprint: compare the contents of recomputed
// tensors.

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <functional>
#include <utility>

#include "lib/base/byte_hash.h"
#include "lib/frame/tensor_check.h"
#include "lib/scope/hook_stack.h"
#include "lib/seam/dispatch_mode.h"
#include "lib/tensor/compared_elements.h"
#include "lib/tensor/content_hash.h"

namespace remat {

namespace {

class ValuesCheck final : public TensorCheck {
 public:
  std::string note(const at::Tensor& saved) const override { return text_of_contents(saved); }
};

/// Compares the hash of the elements that the rule selects, with one NaN for all if the rule says
/// so.
class ElementsCheck : public TensorCheck {
 public:
  explicit ElementsCheck(const ValueComparison& rule) : rule_(rule) {}
  std::string note(const at::Tensor& saved) const override {
    const std::string bytes = compared_elements(saved, rule_);
    return fmt::format("{:016x}", hash_of_bytes(bytes.data(), bytes.size()));
  }

 protected:
  const ValueComparison rule_;
};

/// Keeps the elements themselves, since a hash does not show how far apart values are.
class ToleranceCheck final : public ElementsCheck {
 public:
  using ElementsCheck::ElementsCheck;
  std::string note(const at::Tensor& saved) const override {
    return compared_elements(saved, rule_);
  }
  bool agrees(const std::string& forward, const std::string& recompute) const override {
    return !first_difference(forward, recompute, rule_);
  }
  std::pair<std::string, std::string> texts(const std::string& forward,
                                            const std::string& recompute) const override {
    const auto found = first_difference(forward, recompute, rule_);
    const auto text = [&](const std::string& value) {
      return fmt::format("{} in element {} of {} that were compared", value, found->number,
                         found->num_compared);
    };
    return {text(found->forward), text(found->recompute)};
  }
};

std::unique_ptr<TensorCheck> values_check(const ValueComparison& rule) {
  TORCH_CHECK_VALUE(
      rule.absolute_tolerance >= 0 && rule.relative_tolerance >= 0 && rule.max_elements >= 0,
      "remat::checkpoint: CheckpointOptions::values has a negative or undefined number "
      "(absolute_tolerance ",
      rule.absolute_tolerance, ", relative_tolerance ", rule.relative_tolerance, ", max_elements ",
      rule.max_elements, "). Hint: set tolerances and max_elements to 0 or more.");
  if (rule.absolute_tolerance > 0 || rule.relative_tolerance > 0)
    return std::make_unique<ToleranceCheck>(rule);
  if (rule.max_elements > 0 || rule.nan == ValueComparison::Nan::Any)
    return std::make_unique<ElementsCheck>(rule);
  return std::make_unique<ValuesCheck>();
}

class FingerprintCheck final : public TensorCheck {
 public:
  explicit FingerprintCheck(std::function<std::string(const at::Tensor&)> fingerprint)
      : fingerprint_(std::move(fingerprint)) {}
  std::string note(const at::Tensor& saved) const override {
    // Tensors that the user's function saves do not belong to the region.
    const detail::NoScopes no_scopes;
    const seam::DispatchModeOff unseen;
    const at::NoGradGuard no_grad;
    return fingerprint_(saved);
  }
  std::pair<std::string, std::string> texts(const std::string& forward,
                                            const std::string& recompute) const override {
    return {"fingerprint " + forward, "fingerprint " + recompute};
  }
  bool replaces_metadata() const override { return true; }

 private:
  const std::function<std::string(const at::Tensor&)> fingerprint_;
};

}  // namespace

std::unique_ptr<TensorCheck> check_for(const CheckpointOptions& options) {
  if (options.fingerprint) return std::make_unique<FingerprintCheck>(options.fingerprint);
  if (options.determinism_check != DeterminismCheck::Values) return nullptr;
  return values_check(options.values);
}

}  // namespace remat
