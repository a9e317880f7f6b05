#pragma once
// The user's own pack and unpack functions.

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <exception>
#include <memory>
#include <optional>
#include <utility>

#include "hooks/inspection.h"
#include "remat/hooks.h"

namespace remat {

class UserHooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit UserHooks(std::shared_ptr<detail::HookPair> pair) : pair_(std::move(pair)) {}

  void call_pack_hook(const at::Tensor& saved) override {
    packed_ = pair_->pack(saved);
    pair_.reset();
  }
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const {
    TORCH_CHECK(Inspection::current() != nullptr,
                "remat::SavedTensorHooksGuard: compiled autograd supports Python's hooks only.");
    return std::nullopt;
  }
  at::Tensor call_unpack_hook() override {
    if (Inspection* const inspection = Inspection::current()) return inspection->note({});
    try {
      return packed_->unpack();
    } catch (const std::exception&) {
      throw;
    } catch (...) {  // the engine carries nothing else; on its threads it would end the process
      TORCH_CHECK(false,
                  "remat::SavedTensorHooksGuard: the unpack function threw something that is not a "
                  "std::exception. Do: derive the exception type from std::exception.");
    }
  }

 private:
  std::shared_ptr<detail::HookPair> pair_;
  std::unique_ptr<detail::PackedTensor> packed_;
};

}  // namespace remat
