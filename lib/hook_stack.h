#pragma once
// The thread's stack of active scopes (hooks, regions, guards), as engine threads see it too.

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "lib/engine_seam.h"
#include "remat/scope.h"

namespace remat {

class Frame;

namespace detail {

/// What a scope can be asked for. A scope that answers a question is found without walking.
enum class Ability : uint8_t { Hooks, Region, EarlyStop, Debug, Disable };
inline constexpr std::size_t num_abilities = 5;

/// One entry of the stack: immutable once pushed, except that it can be closed. A closed entry is
/// passed over by every look-up, on whatever thread it is still on a stack; so guards may be
/// destroyed out of order, or inside an engine thread's copy of the stack.
class Scope : public seam::ThreadEntry {
 public:
  /// Hooks for the next saved tensor; null: save it plainly.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() { return nullptr; }
  /// The frame of a region's scope.
  virtual Frame* frame() const { return nullptr; }

  bool is_open() const { return open_.load(std::memory_order_acquire); }
  void close();

  std::optional<bool> early_stop{};
  std::optional<bool> debug{};
  bool is_recompute = false;         ///< of a region's scope: a recompute, not the first run
  bool is_inside_recompute = false;  ///< this region or one around it is recomputed

  /// The innermost open scope with an ability, this one included.
  Scope* nearest(Ability ability);

 protected:
  virtual void on_close() {}
  void answers(Ability ability) { nearest_[static_cast<std::size_t>(ability)] = this; }

 private:
  friend void push(const std::shared_ptr<Scope>& scope);
  friend void pop(Scope& scope);
  friend class StackSwap;
  friend std::unique_ptr<torch::autograd::SavedVariableHooks> make_top_hooks();
  void link(Scope* below);

  std::shared_ptr<Scope> below_{};
  std::array<Scope*, num_abilities> nearest_{};
  int64_t foreign_depth_ = 0;
  std::atomic<bool> open_{false};
};

/// Puts a scope on this thread's stack and makes our engine the default one. Throws the message of
/// a disable guard if `scope` has hooks and hooks are disabled.
void push(const std::shared_ptr<Scope>& scope);
/// Closes a scope and takes the closed ones off the top of this thread's stack.
void pop(Scope& scope);

/// Hooks of the innermost scope that has any; null if LibTorch's own (Python's) come first.
std::unique_ptr<torch::autograd::SavedVariableHooks> make_top_hooks();

/// The innermost open scope with an ability, or null.
Scope* innermost(Ability ability);

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
  std::shared_ptr<Scope> scope_, previous_;
  std::unique_ptr<ForeignHooks> foreign_;
};

}  // namespace detail
}  // namespace remat
