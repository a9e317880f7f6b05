#include "lib/hook_stack.h"

#include <ATen/SavedTensorHooks.h>

#include <utility>

#include "lib/recompute.h"

namespace remat::detail {

namespace {

/// Open scopes with hooks in the whole process: without any, saving a tensor costs one load.
std::atomic<int64_t> num_hook_scopes{0};

Scope* top() { return static_cast<Scope*>(seam::thread_entry()); }

std::shared_ptr<Scope> share(Scope* scope) {
  return scope == nullptr ? nullptr
                          : std::static_pointer_cast<Scope>(scope->shared_from_this());
}

const seam::EngineCallbacks& callbacks() {
  static constexpr seam::EngineCallbacks ours{make_top_hooks, recompute_waits_for_backward};
  return ours;
}

}  // namespace

Scope* Scope::nearest(Ability ability) {
  const auto index = static_cast<std::size_t>(ability);
  Scope* found = nearest_[index];
  while (found != nullptr && !found->is_open())
    found = found->below_ ? found->below_->nearest_[index] : nullptr;
  return found;
}

void Scope::link(Scope* below) {
  below_ = share(below);
  if (below != nullptr)
    for (std::size_t i = 0; i < num_abilities; ++i)
      if (nearest_[i] == nullptr) nearest_[i] = below->nearest_[i];
  foreign_depth_ = seam::foreign_hook_depth();
  if (nearest_[static_cast<std::size_t>(Ability::Hooks)] == this)
    num_hook_scopes.fetch_add(1, std::memory_order_relaxed);
  open_.store(true, std::memory_order_release);
}

void Scope::close() {
  if (!open_.exchange(false, std::memory_order_acq_rel)) return;
  if (nearest_[static_cast<std::size_t>(Ability::Hooks)] == this)
    num_hook_scopes.fetch_sub(1, std::memory_order_relaxed);
  on_close();
}

std::unique_ptr<torch::autograd::SavedVariableHooks> make_top_hooks() {
  if (num_hook_scopes.load(std::memory_order_relaxed) == 0) return nullptr;
  Scope* scope = top();
  if (scope == nullptr) return nullptr;
  scope = scope->nearest(Ability::Hooks);
  if (scope == nullptr) return nullptr;
  const auto& foreign = at::SavedTensorDefaultHooks::get_tls_state();
  if (foreign.disabled_error_message || foreign.is_tracing) return nullptr;
  // Python hooks that were pushed after ours are the inner ones.
  if (static_cast<int64_t>(foreign.stack.size()) > scope->foreign_depth_) return nullptr;
  return scope->make_hooks();
}

Scope* innermost(Ability ability) {
  Scope* scope = top();
  return scope == nullptr ? nullptr : scope->nearest(ability);
}

void push(const std::shared_ptr<Scope>& scope) {
  if (const auto& message = at::SavedTensorDefaultHooks::get_disabled_error_message();
      message && scope->nearest_[static_cast<std::size_t>(Ability::Hooks)] == scope.get())
    TORCH_CHECK(false, *message);
  seam::install(callbacks());
  scope->link(top());
  seam::set_thread_entry(scope);
}

void pop(Scope& scope) {
  scope.close();
  std::shared_ptr<Scope> entry = share(top());
  if (entry == nullptr || entry->is_open()) return;
  while (entry != nullptr && !entry->is_open()) entry = entry->below_;
  seam::set_thread_entry(entry);
}

struct StackSwap::ForeignHooks {
  at::impl::SavedTensorDefaultHooksTLS state;
};

StackSwap::StackSwap(const std::shared_ptr<Scope>& scope)
    : scope_(scope), previous_(share(top())) {
  const auto& foreign = at::SavedTensorDefaultHooks::get_tls_state();
  if (!foreign.stack.empty() || foreign.disabled_error_message || foreign.is_tracing) {
    foreign_ = std::make_unique<ForeignHooks>(ForeignHooks{foreign});
    at::SavedTensorDefaultHooks::set_tls_state({});
  }
  seam::install(callbacks());
  scope_->link(nullptr);
  seam::set_thread_entry(scope_);
}

StackSwap::~StackSwap() {
  scope_->close();
  while (previous_ != nullptr && !previous_->is_open()) previous_ = previous_->below_;
  seam::set_thread_entry(previous_);
  if (foreign_) at::SavedTensorDefaultHooks::set_tls_state(foreign_->state);
}

}  // namespace remat::detail
