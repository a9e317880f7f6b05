#pragma once
// The user's own pack and unpack functions.

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>
#include <utility>

#include "remat/hooks.h"

namespace remat {

class UserHooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit UserHooks(std::shared_ptr<detail::HookPair> pair) : pair_(std::move(pair)) {}

  void call_pack_hook(const at::Tensor& saved) override {
    packed_ = pair_->pack(saved);
    pair_.reset();
  }
  at::Tensor call_unpack_hook() override { return packed_->unpack(); }

 private:
  std::shared_ptr<detail::HookPair> pair_;
  std::unique_ptr<detail::PackedTensor> packed_;
};

}  // namespace remat
