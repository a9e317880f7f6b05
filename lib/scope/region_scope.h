#pragma once
// The scope of a region's run, and its interfaces: one small interface for each user.

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <optional>

#include "lib/scope/hook_stack.h"
#include "lib/scope/region_info.h"

namespace remat {

class DrawSource;       // lib/rng/draws.h
class GuardWatcher;     // lib/state/user_state.h
class OperatorHandler;  // lib/selective/operator_handler.h
class ScriptWatch;      // lib/frame/script_watch.h
struct LockOwner;       // lib/base/recompute_lock.h

namespace detail {

/// Receives the backwards that a region's function runs.
class BackwardWatcher {
 public:
  /// Called when a backward begins. `targets`: empty for all leaves; `accumulates`: into them.
  /// Throws if the backward is refused.
  virtual void backward_begins(const torch::autograd::edge_list& roots,
                               const torch::autograd::edge_list& targets, bool accumulates) = 0;
  /// Called when a backward has ended, with its results (empty if it threw) and the gradients given
  /// to its roots.
  virtual void backward_ended(const torch::autograd::variable_list& /*gradients*/,
                              const torch::autograd::variable_list& /*given*/) {}

 protected:
  ~BackwardWatcher() = default;  // owned as something else
};

/// Receives the registrations of a region's function on tensors.
class RegistrationWatcher {
 public:
  /// Called when a hook is about to be registered. A recompute returns the handle of forward's
  /// hook, which exists already.
  virtual std::optional<unsigned> known_hook(const at::TensorBase&) { return std::nullopt; }
  /// Called when a hook has this handle. `is_new`: it was registered now, and not known from
  /// forward.
  virtual void hook_registered(const at::TensorBase& tensor, unsigned handle, bool is_new) = 0;
  /// Called when `requires_grad_` is about to be called.
  virtual void requires_grad_changes(const at::TensorBase&) {}
  /// Returns the node at which gradients of a leaf end in this run; null for the leaf's own.
  virtual const seam::NodePtr* gradient_sink(const at::TensorBase&) { return nullptr; }

 protected:
  ~RegistrationWatcher() = default;  // owned as something else
};

/// Receives the tensors whose data are read by others than operators in a region's first run.
class ReadWatcher {
 public:
  virtual ~ReadWatcher() = default;
  /// Called when a tensor was saved in a region inside, or given to a user's pack function.
  virtual void tensor_was_read(const at::Tensor& tensor) = 0;
  /// Called when a backward got the recomputed value of that slot of that region.
  virtual void value_was_handed_over(const at::Tensor& value, int64_t region, int64_t position) = 0;
};

/// The scope of a region while its function runs, in forward or in a recompute. Each query returns
/// null if it does not apply. Called on threads that take part in the run.
class RegionScope : public Scope {
 public:
  /// `region` must outlive the scope.
  explicit RegionScope(const RegionInfo& region) : region_(region) { answers(Ability::Region); }
  const RegionInfo& region() const { return region_; }
  /// Returns whether this thread takes part in the run: others merely inherited the stack
  /// (at::launch).
  virtual bool is_own_thread() const = 0;
  virtual DrawSource* draws() { return nullptr; }
  virtual OperatorHandler* operators() { return nullptr; }
  virtual ReadWatcher* reads() { return nullptr; }
  virtual BackwardWatcher* backwards() { return nullptr; }
  virtual RegistrationWatcher* registrations() { return nullptr; }
  virtual GuardWatcher* guards() { return nullptr; }
  virtual ScriptWatch* scripts() { return nullptr; }
  /// Called when a region inside has returned, in which a batch norm moved running statistics with
  /// this storage.
  virtual void statistics_moved(const c10::StorageImpl* /*statistics*/) {}

  bool is_recompute = false;              ///< not the first run
  bool is_inside_recompute = false;       ///< this region, or one around it, is recomputed
  bool is_save_region = false;            ///< a part of its region that recomputes do not run
  const LockOwner* lock_owner = nullptr;  ///< of a recompute

 private:
  const RegionInfo& region_;
};

/// Finds the innermost region of this thread, or null.
inline RegionScope* innermost_region() {
  return static_cast<RegionScope*>(innermost(Ability::Region));
}

/// Visits every region of this thread, innermost first.
template <class Visitor>
void visit_regions(Visitor&& visitor) {
  visit(Ability::Region, [&](Scope& scope) { visitor(static_cast<RegionScope&>(scope)); });
}

}  // namespace detail
}  // namespace remat
