#pragma once
// The thread's stack of active scopes (hooks, regions, guards), as engine threads see it too.

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "lib/seam/engine.h"
#include "remat/scope.h"

namespace remat {

class SharedRecomputes;
class DrawLog;
class DrawReplay;
class Frame;
class Replay;
class Selection;
struct LockOwner;
struct UserRegistrations;

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
  Cache
};
inline constexpr std::size_t num_abilities = 9;

/// Which hooks a tensor passes that is saved on behalf of a region.
enum class HooksAround {
  None,
  Regions,  ///< of the region around it, which drops the tensor; else none
  All       ///< whatever is active around it, as for its inputs
};

class Scope;

/// One place of the stack: a scope, and what lies below it. Immutable, so that the copies which
/// LibTorch gives to other threads never change under them. The first node of a scope is a part of
/// it and shares its ownership; others own it.
struct StackNode final : seam::ThreadEntry {
  StackNode(Scope& scope, std::shared_ptr<StackNode> below, int64_t foreign_depth);
  ~StackNode() override;

  /// The innermost open scope with an ability, from here downwards.
  Scope* nearest(Ability ability) const;

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
  /// The same for what is saved on behalf of a region in here.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks_for(HooksAround) {
    return make_hooks();
  }
  /// The frame of a region's scope.
  virtual Frame* frame() const { return nullptr; }
  /// Of a region's first run: where its draws from that generator are noted. Of a recompute: what
  /// draws them again.
  virtual DrawLog* draw_log(const c10::GeneratorImpl&) const { return nullptr; }
  virtual DrawReplay* draw_replay(const c10::GeneratorImpl&) { return nullptr; }
  /// Of a recompute.
  virtual const LockOwner* lock_owner() const { return nullptr; }
  /// Of a region's first run: what keeps its operators' results. Of a recompute: what replays them.
  /// Null where there is no such thing, and on threads that merely inherited the scope.
  virtual Selection* selection() const { return nullptr; }
  /// Of a region's scope: whether the thread takes part in its run.
  virtual bool is_own_thread() const { return true; }
  virtual Replay* replay() { return nullptr; }
  /// Of a recompute: a guard of state.h has been opened in it.
  virtual void guard_opened(const UserRegistrations&) {}
  /// Of a region's scope: a backward begins in it. Throws what speaks against that.
  virtual void backward_begins(const torch::autograd::edge_list& /*roots*/,
                               const torch::autograd::edge_list& /*targets*/,
                               bool /*accumulates*/) {}
  /// It has ended and returned these.
  virtual void backward_ended(const torch::autograd::variable_list& /*gradients*/,
                              const torch::autograd::variable_list& /*given*/) {}
  /// Of a region's scope: a hook is about to be registered on a tensor. Of a recompute: the handle of
  /// forward's, which is there already; or none.
  virtual std::optional<unsigned> known_hook(const at::TensorBase&) { return std::nullopt; }
  /// It has this handle. `is_new`: it has been registered now.
  virtual void hook_registered(const at::TensorBase&, unsigned /*handle*/, bool /*is_new*/) {}
  /// Of a recompute: `requires_grad_` is about to be called.
  virtual void requires_grad_changes(const at::TensorBase&) {}
  /// Of a recompute: the node at which its gradients of a leaf end; null: the leaf's own.
  virtual const seam::NodePtr* gradient_sink(const at::TensorBase&) { return nullptr; }
  /// Adds what a guard of state.h registered, or the region of a recompute keeps.
  virtual void add_to(UserRegistrations&) const {}
  /// Of a guard that lets backward calls share recomputes.
  virtual std::shared_ptr<SharedRecomputes> backwards() const { return nullptr; }

  bool is_open() const { return open_.load(std::memory_order_acquire); }
  bool has(Ability ability) const { return (abilities_ >> static_cast<unsigned>(ability)) & 1u; }
  /// One bit for each ability.
  uint32_t abilities() const { return abilities_; }
  void open();
  void close();

  /// A node of the stack for this scope.
  std::shared_ptr<StackNode> make_node(std::shared_ptr<StackNode> below, int64_t foreign_depth);

  std::optional<bool> early_stop{};
  std::optional<bool> debug{};
  std::string message{};             ///< of a scope that forbids hooks
  bool is_recompute = false;         ///< of a region's scope: a recompute, not the first run
  bool is_inside_recompute = false;  ///< this region or one around it is recomputed
  bool is_save_region = false;       ///< a part of its region that recomputes do not run

 protected:
  virtual void on_close() {}
  void answers(Ability ability) { abilities_ |= 1u << static_cast<unsigned>(ability); }

 private:
  struct OwningNode;
  std::optional<StackNode> node_;  // its first
  uint32_t abilities_ = 0;
  std::atomic<bool> open_{false};
};

/// Puts a scope on this thread's stack and makes our engine the default one. Throws the message of
/// a disable guard if `scope` has hooks and hooks are disabled.
void push(const std::shared_ptr<Scope>& scope);
/// Closes a scope and takes it out of this thread's stack, wherever it stands there.
void pop(Scope& scope);

/// Hooks of the innermost scope that has any; null if LibTorch's own (Python's) come first, unless
/// `is_decided` says that none are wanted.
std::unique_ptr<torch::autograd::SavedVariableHooks> make_top_hooks(bool& is_decided);

/// Of a region's scope that is open on this thread.
std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks_around(const Scope& region,
                                                                       HooksAround which);

/// Whether a tensor that is saved on behalf of such a region may meet any hook at all.
bool may_meet_hooks_around(const Scope& region, HooksAround which);

/// While alive, what this thread saves passes the hooks around a region.
class SaveAround {
 public:
  SaveAround(const Scope& region, HooksAround which);
  ~SaveAround();
  SaveAround(const SaveAround&) = delete;
  SaveAround& operator=(const SaveAround&) = delete;

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
  /// The innermost open scope with an ability, or null.
  Scope* innermost(Ability ability) const {
    return top_ == nullptr ? nullptr : top_->nearest(ability);
  }

 private:
  const StackNode* top_;
};

/// The innermost open scope with an ability, or null.
Scope* innermost(Ability ability);
/// Every open scope of this thread with an ability, innermost first.
void visit(Ability ability, c10::function_ref<void(Scope&)> visitor);

/// While alive, the thread's stack is the given scope alone, and LibTorch's own hook stack is empty
/// and enabled: a recompute starts clean (Rule 3). Restores both exactly.
class StackSwap {
 public:
  explicit StackSwap(const std::shared_ptr<Scope>& scope);
  ~StackSwap();
  StackSwap(const StackSwap&) = delete;
  StackSwap& operator=(const StackSwap&) = delete;

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
  NoScopes(const NoScopes&) = delete;
  NoScopes& operator=(const NoScopes&) = delete;

 private:
  std::shared_ptr<StackNode> previous_;
};

}  // namespace detail
}  // namespace remat
