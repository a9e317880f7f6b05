// DeterminismCheck::Values and CheckpointOptions::fingerprint: compare the contents of recomputed tensors.

#include <functional>
#include <utility>

#include "lib/frame/tensor_check.h"
#include "lib/scope/hook_stack.h"
#include "lib/seam/dispatch_mode.h"
#include "lib/tensor/content_hash.h"

namespace remat {

namespace {

constexpr char fact[] =
    "Recomputed values for the following tensors have different contents than during the forward pass.";
constexpr char advice[] =
    "Cause: the function computes other numbers the second time (nondeterministic kernels, an "
    "unregistered generator, a parameter changed through .data(), or a counter that it reads: a step "
    "number, annealing, warm-up).\nDo: make the kernels deterministic, call backward before parameters "
    "change, and pass such a number as an argument: the recompute gets forward's.\n";

class ValuesCheck final : public TensorCheck {
 public:
  std::string note(const at::Tensor& saved) const override { return text_of_contents(saved); }
  const Report& report() const override {
    static constexpr Report all{CheckpointError::Kind::ValueMismatch, fact, advice, "hash"};
    return all;
  }
};

class FingerprintCheck final : public TensorCheck {
 public:
  explicit FingerprintCheck(std::function<std::string(const at::Tensor&)> fingerprint)
      : fingerprint_(std::move(fingerprint)) {}
  std::string note(const at::Tensor& saved) const override {
    // What the user's function saves is none of the region's.
    const detail::NoScopes no_scopes;
    const seam::DispatchModeOff unseen;
    const at::NoGradGuard no_grad;
    return fingerprint_(saved);
  }
  const Report& report() const override {
    static constexpr Report all{CheckpointError::Kind::ValueMismatch, fact, advice, "fingerprint"};
    return all;
  }
  bool replaces_metadata() const override { return true; }

 private:
  const std::function<std::string(const at::Tensor&)> fingerprint_;
};

const RegisteredCheck registered(
    [](const CheckpointOptions& options) -> std::unique_ptr<TensorCheck> {
      if (options.fingerprint) return std::make_unique<FingerprintCheck>(options.fingerprint);
      if (options.determinism_check != DeterminismCheck::Values) return nullptr;
      return std::make_unique<ValuesCheck>();
    });

}  // namespace

}  // namespace remat
