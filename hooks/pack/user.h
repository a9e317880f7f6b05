#pragma once
// The user's own pack and unpack functions.

#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <exception>
#include <memory>
#include <utility>

#include "hooks/pack/inspection.h"
#include "lib/seam/own_hooks.h"
#include "remat/hooks.h"

namespace remat {

class UserHooks final : public seam::OwnHooks {
 public:
  /// A function that calls `pack`, which packs `saved`.
  using Surround = void (*)(const at::Tensor& saved, c10::function_ref<void()> pack);
  UserHooks(std::shared_ptr<detail::HookPair> pair, Surround surround)
      : pair_(std::move(pair)), surround_(surround) {}

  void call_pack_hook(const at::Tensor& saved) override {
    surround_(saved, [&] { packed_ = pair_->pack(saved); });
    pair_.reset();
  }
  at::Tensor call_unpack_hook() override {
    if (Inspection* const inspection = Inspection::current()) return inspection->note({});
    try {
      return packed_->unpack();
    } catch (const std::exception&) {
      throw;
      // The engine carries no other exception; on its threads it would end the process.
    } catch (...) {
      TORCH_CHECK(false,
                  "remat::SavedTensorHooksGuard: the unpack function threw something that is not a "
                  "std::exception. Hint: derive the exception type from std::exception.");
    }
  }

 private:
  void refuse_tracing() const override {
    TORCH_CHECK(Inspection::current() != nullptr,
                "remat::SavedTensorHooksGuard: compiled autograd supports Python's hooks only. "
                "Hint: run backward without compiled autograd.");
  }
  std::shared_ptr<detail::HookPair> pair_;
  const Surround surround_;
  std::unique_ptr<detail::PackedTensor> packed_;
};

}  // namespace remat
