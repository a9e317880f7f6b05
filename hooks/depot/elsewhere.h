#pragma once
// The hook of one saved tensor that a depot may move.

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>
#include <utility>

#include "hooks/depot/depot.h"

namespace remat {

class Elsewhere final : public torch::autograd::SavedVariableHooks {
 public:
  /// Makes a hook. `stands_for` (see Depot::take) is used only by the pack call, which follows at
  /// once.
  Elsewhere(std::shared_ptr<Depot> depot, const at::Tensor* stands_for)
      : depot_(std::move(depot)), stands_for_(stands_for) {}

  void call_pack_hook(const at::Tensor& saved) override {
    saved_ = depot_->take(saved, stands_for_);
    depot_.reset();
  }
  at::Tensor call_unpack_hook() override { return saved_->unpack(); }

 private:
  std::shared_ptr<Depot> depot_;
  const at::Tensor* stands_for_;
  std::shared_ptr<SavedElsewhere> saved_;
};

}  // namespace remat
