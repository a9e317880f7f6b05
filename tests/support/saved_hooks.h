#pragma once
// Hooks of saved tensors: functions to pack and unpack with, hooks of one saved tensor, and whether
// any are active.

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <functional>
#include <memory>
#include <utility>

#include "tests/support/support.h"

namespace remat::testing {

inline Tensor identity(const Tensor& t) { return t; }
inline Tensor doubled(const Tensor& t) { return t * 2; }
inline Tensor halved(const Tensor& t) { return t / 2; }

/// LibTorch's own hooks for one saved tensor.
class FunctionHooks : public torch::autograd::SavedVariableHooks {
 public:
  using Fn = std::function<Tensor(const Tensor&)>;
  FunctionHooks(Fn pack, Fn unpack) : pack_(std::move(pack)), unpack_(std::move(unpack)) {}
  void call_pack_hook(const Tensor& tensor) override { packed_ = pack_(tensor).detach(); }
  Tensor call_unpack_hook() override { return unpack_(packed_); }

 private:
  Fn pack_, unpack_;
  Tensor packed_;
};

inline void register_hooks(torch::autograd::SavedVariable& saved, FunctionHooks::Fn pack,
                           FunctionHooks::Fn unpack) {
  saved.register_hooks(std::make_unique<FunctionHooks>(std::move(pack), std::move(unpack)));
}

/// Returns true if autograd would call a hook, of remat or of another user, here and now.
inline bool hooks_are_active() {
  return torch::autograd::Engine::get_default_engine().get_default_saved_variable_hooks() !=
         nullptr;
}

}  // namespace remat::testing
