// Bodies of hooks.h: the guards around the user's own saved-tensor hooks.

#include "remat/hooks.h"

#include <ATen/SavedTensorHooks.h>

#include <atomic>
#include <utility>

#include "hooks/pack/user.h"
#include "lib/scope/hook_stack.h"
#include "lib/scope/packing.h"

namespace remat {

namespace detail {

namespace {

void pack_in_region(const at::Tensor& saved, c10::function_ref<void()> pack) {
  const Packing packing(saved);
  pack();
}

class UserHooksScope final : public Scope {
 public:
  explicit UserHooksScope(std::shared_ptr<HookPair> pair) : pair_(std::move(pair)) {
    answers(Ability::Hooks);
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    auto pair = pair_.load();
    return pair ? std::make_unique<UserHooks>(std::move(pair), pack_in_region) : nullptr;
  }

 private:
  // The user's functions are released with the guard, even if a stale stack still holds this scope.
  void on_close() override { pair_.store(nullptr); }
  std::atomic<std::shared_ptr<HookPair>> pair_;
};

/// Sets LibTorch's own switch to the innermost open guard, and back to its first state when no
/// guard is open.
class ForbidHooksScope final : public Scope {
 public:
  explicit ForbidHooksScope(std::string text) : message_(std::move(text)) {
    // Checked here, since LibTorch's own check throws with hooks already disabled.
    TORCH_CHECK(innermost(Ability::Hooks) == nullptr &&
                    at::SavedTensorDefaultHooks::get_tls_state().stack.empty(),
                message_);
    if (const auto* around = static_cast<const ForbidHooksScope*>(innermost(Ability::ForbidHooks)))
      before_ = around->before_;
    else
      before_ = at::SavedTensorDefaultHooks::get_disabled_error_message();
    set_switch(message_);
    answers(Ability::ForbidHooks);
  }

 private:
  static void set_switch(const std::optional<std::string>& text) {
    if (text)
      seam::forbid_foreign_hooks(*text);
    else
      at::SavedTensorDefaultHooks::enable();
  }
  void on_close() override {
    const auto* left = static_cast<const ForbidHooksScope*>(innermost(Ability::ForbidHooks));
    set_switch(left != nullptr ? left->message_ : before_);
  }
  const std::string message_;
  std::optional<std::string> before_;
};

}  // namespace

// Note [Identity packs]
// A pack function that returns its argument, or a view of it, would make a cycle: node, hook,
// tensor, node. LibTorch restores history and requires_grad itself when it unpacks, so an alias of
// the data is enough. A tensor that does not require grad has no history and remains the same
// object.
at::Tensor without_history(const at::Tensor& packed) {
  return packed.requires_grad() ? packed.tensor_data() : packed;
}

}  // namespace detail

SavedTensorHooksGuard::SavedTensorHooksGuard(std::shared_ptr<detail::HookPair> pair)
    : ScopeGuard(std::make_shared<detail::UserHooksScope>(std::move(pair))) {}

DisableSavedTensorHooksGuard::DisableSavedTensorHooksGuard(std::string message)
    : ScopeGuard(std::make_shared<detail::ForbidHooksScope>(std::move(message))) {}

}  // namespace remat
