#pragma once
// The thread's stack of active scopes (hooks, regions, guards), which engine threads inherit.

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

/// The questions that a scope can answer. A scope that answers one is found without walking the
/// stack.
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

/// The hooks for a tensor that is saved on behalf of a region.
enum class HooksAround {
  None,
  Regions,  ///< of the region around, which drops the tensor; none without one
  All       ///< all that are active around it, as for its inputs
};

class Scope;

/// One place of the stack: a scope, and the nodes below it. Immutable, so that the copies that
/// LibTorch gives to other threads never change under them. The first node of a scope is a member
/// of it and shares its ownership; other nodes own their scope.
struct StackNode final : seam::ThreadEntry {
  StackNode(Scope& scope, std::shared_ptr<StackNode> below, int64_t foreign_depth);
  ~StackNode() override;

  /// Returns the node of the innermost open scope with an ability, from here downwards.
  const StackNode* nearest(Ability ability) const;

  Scope* const scope;
  std::shared_ptr<StackNode> below;
  std::array<StackNode*, num_abilities> with{};  ///< by ability: the nearest node from here
  const int64_t foreign_depth;                   ///< of LibTorch's own hook stack, at the push
};

/// An entry of a guard or a region on the stack. Look-ups skip a closed scope on every thread whose
/// stack still holds it. So guards may be destroyed out of order, or inside an engine thread's copy
/// of the stack.
class Scope : public std::enable_shared_from_this<Scope> {
 public:
  virtual ~Scope() = default;
  /// Returns hooks for the next saved tensor, or null to save it without hooks.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() { return nullptr; }
  /// Returns hooks for a tensor that is saved on behalf of a region in this scope.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks_for(HooksAround) {
    return make_hooks();
  }
  /// Returns its registrations for recomputes of the regions in it; for `Ability::State`.
  virtual std::shared_ptr<const UserRegistrations> registered_state() const { return nullptr; }
  /// Returns the level up to which calls in it are regions; for `Ability::Level`.
  virtual int64_t training_level() const { return 0; }

  bool is_open() const { return open_.load(std::memory_order_acquire); }
  bool has(Ability ability) const { return (abilities_ >> static_cast<unsigned>(ability)) & 1u; }
  /// Each ability has one bit.
  uint32_t abilities() const { return abilities_; }
  void open();
  void close();

  /// Makes a node of the stack for this scope.
  std::shared_ptr<StackNode> make_node(std::shared_ptr<StackNode> below, int64_t foreign_depth);

  std::optional<bool> early_stop{};  ///< for `Ability::EarlyStop`
  std::optional<bool> debug{};       ///< for `Ability::Debug`

 protected:
  virtual void on_close() {}
  void answers(Ability ability) { abilities_ |= 1u << static_cast<unsigned>(ability); }

 private:
  struct OwningNode;
  std::optional<StackNode> node_;  // its first node
  uint32_t abilities_ = 0;
  std::atomic<bool> open_{false};
};

/// Returns the functions that the engine calls. Defined above everything that they call
/// (lib/entry/engine_callbacks.cpp).
const seam::EngineCallbacks& engine_callbacks();

/// Puts a scope on this thread's stack and makes our engine the default one. Throws the message of
/// a disable guard if `scope` has hooks and hooks are disabled.
void push(const std::shared_ptr<Scope>& scope);
/// Closes a scope and removes it from any place in this thread's stack.
void pop(Scope& scope);

/// Returns hooks of the innermost scope that has any. Null if LibTorch's own (Python's) hooks come
/// first or, if `is_decided` is set, no hooks are wanted.
std::unique_ptr<torch::autograd::SavedVariableHooks> make_top_hooks(bool& is_decided);

/// Returns the hooks around a region whose scope is open on this thread.
std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks_around(const Scope& region,
                                                                       HooksAround which);

/// Returns whether a tensor saved on behalf of such a region may reach any hook.
bool may_meet_hooks_around(const Scope& region, HooksAround which);

/// Passes tensors that this thread saves to the hooks around a region while alive.
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

/// The thread's present stack, found once for several questions. Use it at once.
class StackView {
 public:
  StackView();
  /// Returns the innermost open scope with an ability, or null.
  Scope* innermost(Ability ability) const {
    const StackNode* const node = top_ == nullptr ? nullptr : top_->nearest(ability);
    return node == nullptr ? nullptr : node->scope;
  }

 private:
  const StackNode* top_;
};

/// Returns whether any thread may have an open scope with an ability: one load, no look-up.
bool is_any_open(Ability ability);

/// Returns the innermost open scope with an ability, or null.
Scope* innermost(Ability ability);
/// Visits every open scope of this thread with an ability, innermost first.
void visit(Ability ability, c10::function_ref<void(Scope&)> visitor);

/// Makes the given scope the whole stack of the thread while alive, and LibTorch's own hook stack
/// empty and enabled: a recompute starts clean (Rule 3). Restores both exactly.
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

/// Hides the thread's scopes while alive: tensors computed meanwhile belong to no region.
class NoScopes {
 public:
  /// The hidden scopes: all, or regions and the scopes inside the outermost one.
  enum class Hidden : uint8_t { All, Regions };
  explicit NoScopes(Hidden hidden = Hidden::All);
  ~NoScopes();
  NoScopes& operator=(NoScopes&&) = delete;

 private:
  std::shared_ptr<StackNode> previous_;
};

}  // namespace detail
}  // namespace remat
