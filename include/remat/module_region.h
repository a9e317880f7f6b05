#pragma once
// The options and the switch of a checkpointed module.

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <typeinfo>

#include "remat/export.h"
#include "remat/options.h"
#include "remat/scope.h"

namespace remat {

/// The options of one checkpointed module.
struct ModuleOptions {
  /// Options of the module's regions. Regions without a name are named by the type of the module.
  CheckpointOptions checkpoint{.location = {}};
  /// True if a module in eval mode runs plainly. A warning says so once if a backward reaches the
  /// results of such a call: its tensors were all saved.
  bool training_only = true;
  bool enabled = true;  ///< calls are regions; `set_checkpointing` switches it
  /// The module's level for `set_checkpoint_level`; 0: a region only if `set_checkpointing`
  /// switches it on.
  int64_t level = 1;
  BufferPolicy buffers = BufferPolicy::Restore;  ///< treatment of running statistics
};

struct UserRegistrations;  // lib/state/user_state.h

namespace detail {

/// The options and the switch of a checkpointed module. All calls are safe during a forward on
/// another thread, which sees the old or the new state of the switch.
class REMAT_API ModuleRegion {
 public:
  ModuleRegion(torch::nn::Module& owner, const std::type_info& type, ModuleOptions options);
  ModuleRegion(torch::nn::Module& owner, const std::type_info& type, const ModuleRegion& other);
  ~ModuleRegion();
  ModuleRegion(const ModuleRegion&) = delete;
  ModuleRegion& operator=(const ModuleRegion& other);

  /// Returns whether a call now is a region. Warns once if a BatchNorm prevents it.
  bool is_wanted();
  /// Returns whether the module runs inside another region, whose recomputes also need its state.
  bool is_watched() const;
  bool is_enabled() const { return enabled_; }
  void enable(bool enabled) { enabled_ = enabled; }
  void set_training_level(int64_t level);
  /// Returns whether the switch and the module's mode select regions now.
  bool is_on() const;
  /// Returns whether a call now, outside of regions, would be a region in training mode, and only
  /// `training_only` prevents that.
  bool is_off_in_eval() const;
  /// Warns, once for each type of module, when a backward reaches this result of such a call.
  void watch_result(const at::Tensor& result) const;
  /// Records a call that reached this region with grad mode on while it was switched on. The call
  /// opened a region, or a guard or policy prevented that. `forget_calls` deletes the record.
  void note_call() { was_called_ = true; }
  bool was_called() const { return was_called_; }
  void forget_calls() { was_called_ = false; }
  const CheckpointOptions& checkpoint_options() const { return options_->checkpoint; }
  const ModuleOptions& options() const { return *options_; }
  /// Replaces the options; the switch stays. No call of the module may run meanwhile.
  void set_options(ModuleOptions options);
  /// Returns the module, which its regions keep alive. Throws if no shared pointer owns it.
  std::shared_ptr<torch::nn::Module> owner() const;
  /// Records that clone() made this object's module; see Note [Options of a cloned child].
  void was_cloned();

 private:
  friend class ModuleStateGuard;
  void adopt(const ModuleRegion& other);

  torch::nn::Module* const owner_;
  const std::type_info& type_;
  std::shared_ptr<const ModuleOptions> options_;
  std::atomic<bool> enabled_;
  std::atomic<bool> has_warned_{false};
  std::atomic<bool> was_called_{false};
  bool was_cloned_ = false;
};

/// Registers, while alive, the module's present training flags, and its buffers if its policy says
/// so. Recomputes of enclosing regions and of regions that begin on this thread see them.
class REMAT_API ModuleStateGuard : ScopeGuard {
 public:
  explicit ModuleStateGuard(const ModuleRegion& region);

 private:
  explicit ModuleStateGuard(std::shared_ptr<const UserRegistrations> registrations);
};

/// A function whose regions are named by a type, if their options do not name them.
template <class F, class Type>
struct CalledByType : F {
  static const std::type_info& type_of_name() { return typeid(Type); }
};

/// The base by which `set_checkpointing` finds checkpointed modules.
class REMAT_API HasModuleRegion {
 public:
  virtual ~HasModuleRegion();
  /// Returns the type of the module without regions.
  virtual const std::type_info& plain_type() const = 0;

 private:
  friend REMAT_API ModuleRegion* region_of(torch::nn::Module& module);
  virtual ModuleRegion& remat_region() = 0;
};
/// Returns the region of a checkpointed module; null for other modules.
REMAT_API ModuleRegion* region_of(torch::nn::Module& module);

}  // namespace detail

}  // namespace remat
