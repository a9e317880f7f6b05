#pragma once
// The thread's stack of active scopes (hooks, regions, guards), as engine threads see it too.

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include <c10/util/FunctionRef.h>

#include "lib/seam/engine.h"
#include "remat/scope.h"

namespace remat {

struct UserRegistrations;  // lib/state/user_state.h

namespace detail {

/// What a scope can be asked for. A scope that answers a question is found without walking.
enum class Ability : uint8_t {
  Hooks,
  Region,
  EarlyStop,
  Debug,
  Disable,
  ForbidHooks,
  State,
  Group,
  Cache,
  Level,
  Budget
};
inline constexpr std::size_t num_abilities = 11;

/// Which hooks a tensor passes that is saved on behalf of a region.
enum class HooksAround {
  None,
  Regions,  ///< of the region around it, which drops the tensor; else none
  All       ///< whatever is active around it, as for its inputs
};

class Scope;

/// A node is one place of the stack: a scope, and what lies below it. Immutable, so that the copies
/// which LibTorch gives to other threads never change under them. The first node of a scope is a
/// part of it and shares its ownership; others own it.
struct StackNode final : seam::ThreadEntry {
  StackNode(Scope& scope, std::shared_ptr<StackNode> below, int64_t foreign_depth);
  ~StackNode() override;

  /// Finds the node of the innermost open scope with an ability, from here downwards.
  const StackNode* nearest(Ability ability) const;

  Scope* const scope;
  std::shared_ptr<StackNode> below;
  std::array<StackNode*, num_abilities> with{};  ///< by ability: the nearest node from here
  const int64_t foreign_depth;                   ///< of LibTorch's own hook stack, at the push
};

/// What a guard or a region puts on the stack. A closed scope is passed over by every look-up, on
/// whatever thread it is still on a stack; so guards may be destroyed out of order, or inside an
/// engine thread's copy of the stack.
class Scope : public std::enable_shared_from_this<Scope> {
 public:
  virtual ~Scope() = default;
  /// Hooks for the next saved tensor; null: save it plainly.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() { return nullptr; }
  /// Makes hooks for what is saved on behalf of a region in here.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks_for(HooksAround) {
    return make_hooks();
  }
  /// Whether its hooks leave the bytes of such a tensor alone: they keep it as it is, or let go of
  /// it.
  virtual bool leaves_alone(const at::Tensor& /*saved*/) const { return false; }
  /// Says what it registers for the recomputes of the regions in it; of `Ability::State`.
  virtual std::shared_ptr<const UserRegistrations> registered_state() const { return nullptr; }
  /// Up to which level calls in it are regions; of `Ability::Level`.
  virtual int64_t training_level() const { return 0; }

  bool is_open() const { return open_.load(std::memory_order_acquire); }
  bool has(Ability ability) const { return (abilities_ >> static_cast<unsigned>(ability)) & 1u; }
  /// Each ability has one bit.
  uint32_t abilities() const { return abilities_; }
  void open();
  void close();

  /// Makes a node of the stack for this scope.
  std::shared_ptr<StackNode> make_node(std::shared_ptr<StackNode> below, int64_t foreign_depth);

  std::optional<bool> early_stop{};  ///< of `Ability::EarlyStop`
  std::optional<bool> debug{};       ///< of `Ability::Debug`

 protected:
  virtual void on_close() {}
  void answers(Ability ability) { abilities_ |= 1u << static_cast<unsigned>(ability); }

 private:
  struct OwningNode;
  std::optional<StackNode> node_;  // its first
  uint32_t abilities_ = 0;
  std::atomic<bool> open_{false};
};

/// Returns what the engine is to call. Defined above all that it calls
/// (lib/entry/engine_callbacks.cpp).
const seam::EngineCallbacks& engine_callbacks();

/// Puts a scope on this thread's stack and makes our engine the default one. Throws the message of
/// a disable guard if `scope` has hooks and hooks are disabled.
void push(const std::shared_ptr<Scope>& scope);
/// Closes a scope and takes it out of this thread's stack, wherever it stands there.
void pop(Scope& scope);

/// Hooks of the innermost scope that has any; null if LibTorch's own (Python's) come first, unless
/// `is_decided` says that none are wanted.
std::unique_ptr<torch::autograd::SavedVariableHooks> make_top_hooks(bool& is_decided);

/// Makes the hooks around a region whose scope is open on this thread.
std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks_around(const Scope& region,
                                                                       HooksAround which);

/// Whether a tensor that is saved on behalf of such a region may meet any hook at all.
bool may_meet_hooks_around(const Scope& region, HooksAround which);

/// Whose hooks it meets.
struct ScopeAround {
  Scope* scope = nullptr;   ///< null: none of ours
  bool is_foreign = false;  ///< LibTorch's own
};
ScopeAround scope_with_hooks_around(const Scope& region, HooksAround which);

/// While alive, what this thread saves passes the hooks around a region.
class SaveAround {
 public:
  SaveAround(const Scope& region, HooksAround which);
  ~SaveAround();
  SaveAround& operator=(SaveAround&&) = delete;

 private:
  friend std::unique_ptr<torch::autograd::SavedVariableHooks> make_top_hooks(bool& is_decided);
  const Scope& region_;
  const HooksAround which_;
  const SaveAround* const outer_;
};

/// The thread's stack as it is now, for several questions at the price of one. Use it at once.
class StackView {
 public:
  StackView();
  /// Finds the innermost open scope with an ability, or null.
  Scope* innermost(Ability ability) const {
    const StackNode* const node = top_ == nullptr ? nullptr : top_->nearest(ability);
    return node == nullptr ? nullptr : node->scope;
  }

 private:
  const StackNode* top_;
};

/// Whether any thread may have an open scope with an ability: a load, no look-up.
bool is_any_open(Ability ability);

/// Finds the innermost open scope with an ability, or null.
Scope* innermost(Ability ability);
/// Visits every open scope of this thread with an ability, innermost first.
void visit(Ability ability, c10::function_ref<void(Scope&)> visitor);

/// While alive, the thread's stack is the given scope alone, and LibTorch's own hook stack is empty
/// and enabled: a recompute starts clean (Rule 3). Restores both exactly.
class StackSwap {
 public:
  explicit StackSwap(const std::shared_ptr<Scope>& scope);
  ~StackSwap();
  StackSwap& operator=(StackSwap&&) = delete;

 private:
  struct ForeignHooks;
  std::shared_ptr<Scope> scope_;
  std::shared_ptr<StackNode> previous_;
  std::unique_ptr<ForeignHooks> foreign_;
};

/// While alive the thread has no scopes: what is computed belongs to no region.
class NoScopes {
 public:
  NoScopes();
  ~NoScopes();
  NoScopes& operator=(NoScopes&&) = delete;

 private:
  std::shared_ptr<StackNode> previous_;
};

}  // namespace detail
}  // namespace remat
