#pragma once
// The scope of a budget's guard: tensors that autograd saves in it get the budget's hooks.

#include <memory>
#include <utility>

#include "lib/budget/runtime.h"
#include "lib/budget/saved.h"
#include "lib/scope/hook_stack.h"

namespace remat::budget {

class BudgetScope final : public detail::Scope {
 public:
  explicit BudgetScope(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {
    answers(detail::Ability::Hooks);
    answers(detail::Ability::Budget);
  }
  Runtime& runtime() const { return *runtime_; }
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    return std::make_unique<Saved>(runtime_);
  }
  /// Returns this thread's innermost budget scope; null without one.
  static const BudgetScope* innermost() {
    return static_cast<const BudgetScope*>(detail::innermost(detail::Ability::Budget));
  }

 private:
  const std::shared_ptr<Runtime> runtime_;
};

}  // namespace remat::budget
