// Bodies of hooks.h: the guards around the user's own saved-tensor hooks.

#include "remat/hooks.h"

#include <ATen/SavedTensorHooks.h>

#include <atomic>
#include <utility>

#include "hooks/user.h"
#include "lib/hook_stack.h"

namespace remat {

namespace detail {

namespace {

class UserHooksScope final : public Scope {
 public:
  explicit UserHooksScope(std::shared_ptr<HookPair> pair) : pair_(std::move(pair)) {
    answers(Ability::Hooks);
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    auto pair = pair_.load();
    return pair ? std::make_unique<UserHooks>(std::move(pair)) : nullptr;
  }

 private:
  // The user's functions go when the guard does, even if a stale stack still holds this scope.
  void on_close() override { pair_.store(nullptr); }
  std::atomic<std::shared_ptr<HookPair>> pair_;
};

}  // namespace

// Note [Identity packs]
// A pack function that returns its argument would make a cycle: node, hook, tensor, node. LibTorch
// restores history and requires_grad itself when it unpacks, so an alias of the data is enough.
// A tensor that does not require grad has no history and stays the same object.
at::Tensor without_history(const at::Tensor& packed, const at::Tensor& saved) {
  return packed.is_same(saved) && saved.requires_grad() ? saved.tensor_data() : packed;
}

}  // namespace detail

SavedTensorHooksGuard::SavedTensorHooksGuard(std::shared_ptr<detail::HookPair> pair)
    : ScopeGuard(std::make_shared<detail::UserHooksScope>(std::move(pair))) {}

DisableSavedTensorHooksGuard::DisableSavedTensorHooksGuard(std::string message) {
  using at::SavedTensorDefaultHooks;
  // Asked here, since LibTorch's own check throws with hooks disabled already.
  TORCH_CHECK(detail::innermost(detail::Ability::Hooks) == nullptr &&
                  SavedTensorDefaultHooks::get_tls_state().stack.empty(),
              message);
  const auto previous = SavedTensorDefaultHooks::get_disabled_error_message();
  SavedTensorDefaultHooks::disable(message, /*fail_if_non_empty=*/false);
  was_disabled_ = previous.has_value();
  if (previous) previous_message_ = *previous;
}

DisableSavedTensorHooksGuard::~DisableSavedTensorHooksGuard() {
  using at::SavedTensorDefaultHooks;
  if (was_disabled_)
    SavedTensorDefaultHooks::disable(previous_message_, /*fail_if_non_empty=*/false);
  else
    SavedTensorDefaultHooks::enable();
}

}  // namespace remat
