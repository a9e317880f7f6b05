#include "lib/scope/hook_stack.h"

#include <ATen/SavedTensorHooks.h>

#include <array>
#include <bit>
#include <utility>
#include <vector>

namespace remat::detail {

namespace {

constexpr uint32_t bit(Ability ability) { return 1U << static_cast<unsigned>(ability); }

/// Open scopes in the whole process, by ability. Only abilities that few programs use are counted,
/// and hooks, so that saving a tensor without any costs one load. Regions have hooks.
constexpr uint32_t counted = bit(Ability::Hooks) | bit(Ability::Disable) | bit(Ability::Group) |
                             bit(Ability::Cache) | bit(Ability::Budget);
std::array<std::atomic<int64_t>, num_abilities> num_open{};

void count_open(uint32_t abilities, int64_t change) {
  for (uint32_t rest = abilities & counted; rest != 0; rest &= rest - 1)
    num_open[static_cast<std::size_t>(std::countr_zero(rest))].fetch_add(change,
                                                                         std::memory_order_relaxed);
}

StackNode* top() { return static_cast<StackNode*>(seam::thread_entry()); }

std::shared_ptr<StackNode> share_top() {
  return std::static_pointer_cast<StackNode>(seam::share_thread_entry());
}

std::shared_ptr<StackNode> exchange_top(std::shared_ptr<StackNode> node) {
  return std::static_pointer_cast<StackNode>(seam::exchange_thread_entry(std::move(node)));
}

/// Returns `node` without the closed scopes on and below it; the same node if there are none.
std::shared_ptr<StackNode> without_closed(std::shared_ptr<StackNode> node) {
  std::vector<StackNode*> open_ones;
  bool has_closed = false;
  for (StackNode* each = node.get(); each != nullptr; each = each->below.get()) {
    if (each->scope->is_open())
      open_ones.push_back(each);
    else
      has_closed = true;
  }
  if (!has_closed) return node;
  std::shared_ptr<StackNode> rebuilt;
  for (auto each = open_ones.rbegin(); each != open_ones.rend(); ++each)
    rebuilt = (*each)->scope->make_node(std::move(rebuilt), (*each)->foreign_depth);
  return rebuilt;
}

}  // namespace

StackNode::StackNode(Scope& owner, std::shared_ptr<StackNode> lower, int64_t depth)
    : scope(&owner), below(std::move(lower)), foreign_depth(depth) {
  if (below != nullptr) with = below->with;
  for (uint32_t rest = owner.abilities(); rest != 0; rest &= rest - 1)
    with[static_cast<std::size_t>(std::countr_zero(rest))] = this;
}

// Iterative, since a deep stack must not be destroyed recursively.
StackNode::~StackNode() {
  while (below != nullptr && below.use_count() == 1) below = std::exchange(below->below, nullptr);
}

const StackNode* StackNode::nearest(Ability ability) const {
  const auto index = static_cast<std::size_t>(ability);
  const StackNode* found = with[index];
  while (found != nullptr && !found->scope->is_open())
    found = found->below ? found->below->with[index] : nullptr;
  return found;
}

struct Scope::OwningNode {
  OwningNode(std::shared_ptr<Scope> scope, std::shared_ptr<StackNode> below, int64_t foreign_depth)
      : owner(std::move(scope)), node(*owner, std::move(below), foreign_depth) {}
  std::shared_ptr<Scope> owner;
  StackNode node;
};

std::shared_ptr<StackNode> Scope::make_node(std::shared_ptr<StackNode> below,
                                            int64_t foreign_depth) {
  if (!node_) {
    node_.emplace(*this, std::move(below), foreign_depth);
    return {shared_from_this(), &*node_};
  }
  auto owning = std::make_shared<OwningNode>(shared_from_this(), std::move(below), foreign_depth);
  StackNode* const node = &owning->node;
  return {std::move(owning), node};
}

void Scope::open() {
  count_open(abilities_, 1);
  open_.store(true, std::memory_order_release);
}

void Scope::close() {
  // Only its owner closes it, so a load followed by a store is enough.
  if (!is_open()) return;
  open_.store(false, std::memory_order_release);
  count_open(abilities_, -1);
  on_close();
}

namespace {
thread_local const SaveAround* save_around = nullptr;

/// Returns the node of a region's scope on this thread's stack, or null.
const StackNode* place_of(const Scope& region) {
  const StackNode* node = top();
  while (node != nullptr && node->scope != &region) node = node->below.get();
  return node;
}
}  // namespace

SaveAround::SaveAround(const Scope& region, HooksAround which)
    : region_(region), which_(which), outer_(std::exchange(save_around, this)) {}
SaveAround::~SaveAround() { save_around = outer_; }

std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks_around(const Scope& region,
                                                                       HooksAround which) {
  if (which == HooksAround::None) return nullptr;
  const StackNode* const place = place_of(region);
  const StackNode* const node =
      place == nullptr || place->below == nullptr
          ? nullptr
          : place->below->nearest(which == HooksAround::All ? Ability::Hooks : Ability::Region);
  const bool is_foreign =
      which == HooksAround::All &&
      (place == nullptr || place->foreign_depth > (node == nullptr ? 0 : node->foreign_depth));
  return is_foreign || node == nullptr ? nullptr : node->scope->make_hooks_for(which);
}

bool may_meet_hooks_around(const Scope& region, HooksAround which) {
  if (which == HooksAround::None) return false;
  if (which == HooksAround::All) return true;  // LibTorch's own, too
  const StackNode* const place = place_of(region);
  return place != nullptr && place->below != nullptr &&
         place->below->nearest(Ability::Region) != nullptr;
}

std::unique_ptr<torch::autograd::SavedVariableHooks> make_top_hooks(bool& is_decided) {
  if (save_around != nullptr) {
    is_decided = save_around->which_ == HooksAround::Regions;
    return make_hooks_around(save_around->region_, save_around->which_);
  }
  if (!is_any_open(Ability::Hooks)) return nullptr;
  const auto [entry, foreign] = seam::thread_view();
  if (entry == nullptr) return nullptr;
  const StackNode* const node = static_cast<StackNode*>(entry)->nearest(Ability::Hooks);
  if (node == nullptr) return nullptr;
  if (foreign.disabled_error_message || foreign.is_tracing) return nullptr;
  // Python hooks that were pushed after ours are inner ones.
  if (static_cast<int64_t>(foreign.stack.size()) > node->foreign_depth) return nullptr;
  return node->scope->make_hooks();
}

StackView::StackView() : top_(top()) {}

bool is_any_open(Ability ability) {
  const Ability by = ability == Ability::Region ? Ability::Hooks : ability;
  return (counted & bit(by)) == 0 ||
         num_open[static_cast<std::size_t>(by)].load(std::memory_order_relaxed) != 0;
}

Scope* innermost(Ability ability) {
  return is_any_open(ability) ? StackView().innermost(ability) : nullptr;
}

void visit(Ability ability, c10::function_ref<void(Scope&)> visitor) {
  if (!is_any_open(ability)) return;
  const auto index = static_cast<std::size_t>(ability);
  const StackNode* node = top();
  for (node = node == nullptr ? nullptr : node->with[index]; node != nullptr;
       node = node->below ? node->below->with[index] : nullptr)
    if (node->scope->is_open()) visitor(*node->scope);
}

void push(const std::shared_ptr<Scope>& scope) {
  if (const auto& message = at::SavedTensorDefaultHooks::get_disabled_error_message();
      message && scope->has(Ability::Hooks))
    TORCH_CHECK(false, *message);
  seam::install(engine_callbacks());
  exchange_top(scope->make_node(share_top(), seam::foreign_hook_depth()));
  scope->open();
}

void pop(Scope& scope) {
  scope.close();
  StackNode* const node = top();
  if (node == nullptr) return;
  if (node->scope == &scope && (node->below == nullptr || node->below->scope->is_open())) {
    exchange_top(node->below);
    return;
  }
  const std::shared_ptr<StackNode> before = share_top();
  if (auto after = without_closed(before); after != before) exchange_top(std::move(after));
}

struct StackSwap::ForeignHooks {
  at::impl::SavedTensorDefaultHooksTLS state;
};

StackSwap::StackSwap(const std::shared_ptr<Scope>& scope) : scope_(scope) {
  const auto& foreign = at::SavedTensorDefaultHooks::get_tls_state();
  if (!foreign.stack.empty() || foreign.disabled_error_message || foreign.is_tracing) {
    foreign_ = std::make_unique<ForeignHooks>(ForeignHooks{foreign});
    at::SavedTensorDefaultHooks::set_tls_state({});
  }
  seam::install(engine_callbacks());
  previous_ = exchange_top(scope_->make_node(nullptr, seam::foreign_hook_depth()));
  scope_->open();
}

StackSwap::~StackSwap() {
  scope_->close();
  exchange_top(without_closed(std::move(previous_)));
  if (foreign_) at::SavedTensorDefaultHooks::set_tls_state(foreign_->state);
}

NoScopes::NoScopes(Hidden hidden) {
  const StackNode* outermost = nullptr;
  if (hidden == Hidden::Regions)
    for (const StackNode* node = top(); node != nullptr; node = node->below.get())
      if (node->scope->is_open() && node->scope->has(Ability::Region)) outermost = node;
  previous_ = exchange_top(outermost == nullptr ? nullptr : outermost->below);
}
NoScopes::~NoScopes() { exchange_top(without_closed(std::move(previous_))); }

}  // namespace remat::detail
