#pragma once
// The saved-tensor hook of a budget.

#include <memory>

#include "hooks/pack/inspection.h"
#include "lib/budget/graph.h"
#include "lib/seam/own_hooks.h"

namespace remat::budget {

/// The hook of one saved tensor. It owns a value with a record, or else an alias of the tensor.
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
  void wait_before_use(const c10::Storage& content) const;
  HeldInfo describe() const;

  const std::shared_ptr<Runtime> runtime_;
  at::Tensor kept_;      // the alias, of a tensor without a value
  Geometry geometry_{};  // of a tensor with a value
  bool has_value_ = false;
  Save save_{};  // guarded by the graph's lock
  c10::VariableVersion counter_{c10::VariableVersion::DISABLED};
  uint32_t version_ = 0;
  bool has_version_ = false;
};

}  // namespace remat::budget
