#pragma once
// The hook of a tensor that autograd saved under a budget.

#include <memory>

#include "hooks/inspection.h"
#include "lib/budget/graph.h"
#include "lib/seam/own_hooks.h"

namespace remat::budget {

/// Keeps a value that can be made again, and else the tensor.
class Saved final : public seam::OwnHooks {
 public:
  explicit Saved(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}
  ~Saved() override;
  Saved& operator=(Saved&&) = delete;

  void call_pack_hook(const at::Tensor& saved) override;
  at::Tensor call_unpack_hook() override;

 private:
  void refuse_tracing() const override;
  void check_version() const;
  HeldInfo describe() const;

  const std::shared_ptr<Runtime> runtime_;
  at::Tensor kept_;      // an alias of what cannot be made again
  Geometry geometry_{};  // of what can
  double clock_ = 0;     // at the save
  c10::VariableVersion counter_{c10::VariableVersion::DISABLED};
  uint32_t version_ = 0;
  bool has_version_ = false;
};

}  // namespace remat::budget
