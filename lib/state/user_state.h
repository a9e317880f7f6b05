#pragma once
// The state registered by guards of state.h around a region: captured, restored, and reported to
// observers.

#include <c10/util/SmallVector.h>

#include <any>
#include <memory>
#include <utility>
#include <vector>

#include "lib/base/place_index.h"
#include "lib/base/recompute_lock.h"
#include "lib/rng/device_rng.h"
#include "lib/scope/hook_stack.h"
#include "lib/scope/region_info.h"
#include "lib/state/module_state.h"
#include "lib/tensor/capture.h"
#include "remat/state.h"

namespace remat {

class DrawLog;

/// The registrations of guards of state.h, outermost first; providers and generators once each,
/// flags once a subject.
struct UserRegistrations {
  std::vector<std::shared_ptr<StateProvider>> providers{};
  c10::SmallVector<std::shared_ptr<TrainingFlags>, 1> flags{};
  std::vector<at::Generator> generators{};
  std::vector<std::shared_ptr<const RecomputeObserver>> observers{};
  /// The innermost module that runs: the function of a region, or a checkpointed module.
  std::weak_ptr<torch::nn::Module> running{};

  void add(const std::shared_ptr<StateProvider>& provider);
  void add(const at::Generator& generator);
  void add(const std::shared_ptr<TrainingFlags>& added);
  /// Adds all registrations of `other`.
  void add(const UserRegistrations& other);
  /// Returns the registrations of the guards, regions and recomputes around this point, then `own`,
  /// which may be null; null if there are none.
  static std::shared_ptr<const UserRegistrations> around(
      const std::shared_ptr<const UserRegistrations>& own);
};

/// Runs user code outside all regions, while alive.
struct OutsideOfRegions {
  const detail::NoScopes no_scopes;
  const at::NoGradGuard no_grad;
};

/// Receives the guards of state.h that are opened inside a region.
class GuardWatcher {
 public:
  /// Called for an opened guard. `states`: the present states of its providers; only for a first
  /// run.
  virtual void guard_opened(const UserRegistrations& opened,
                            const std::vector<std::any>& states) = 0;

 protected:
  ~GuardWatcher() = default;  // owned as something else
};

/// Returns a scope that registers providers and flags. `tell_regions_around` adds them, with their
/// present state, to the regions that are already open.
std::shared_ptr<detail::Scope> scope_that_registers(
    std::shared_ptr<const UserRegistrations> registrations);
void tell_regions_around(const UserRegistrations& registrations);

/// The state of modules with which a recompute begins: Note [Where recomputes begin].
enum class StartsFrom { Begin, End };

/// A region's registrations, and the providers' state when it began. Guards that are opened inside
/// the region add to it, with the state of that moment.
class UserState {
 public:
  UserState() : registered_(std::make_shared<UserRegistrations>()) {}
  /// Calls user code, and throws its exceptions. `registered`: each once.
  UserState(std::shared_ptr<const UserRegistrations> registered, bool preserves_rng);
  ~UserState();
  void keep(const std::shared_ptr<StateProvider>& provider, const std::any& state);
  void keep(const at::Generator& generator);
  void keep(const std::shared_ptr<TrainingFlags>& flags) { to_change().add(flags); }
  const UserRegistrations& registered() const { return *registered_; }
  std::shared_ptr<const UserRegistrations> share_registered() const { return registered_; }
  /// Returns whether it has a provider of the user's.
  bool has_users_providers() const;
  /// Returns the present states of the providers, in their order. Calls user code, and throws its
  /// exceptions.
  std::vector<std::any> states_now() const;
  /// Forgets the buffers that the function did not write; call it when the function has returned.
  /// See Note [Only what forward wrote].
  void settle();
  /// Returns whether the function wrote to buffers otherwise than batch norms do, so that
  /// recomputes must leave them as it did.
  bool is_compared() const { return is_compared_; }
  /// Returns whether their contents at forward's begin are known.
  bool has_begin() const { return has_begin_; }
  /// Returns the possible starts of recomputes, the likelier one first.
  c10::SmallVector<StartsFrom, 2> starts() const;
  /// Notes that a recompute with this start left the same contents as forward.
  void remember(StartsFrom start) const;
  /// Returns the logs of the registered CPU generators.
  const std::vector<std::unique_ptr<DrawLog>>& draw_logs() const { return draw_logs_; }

 private:
  friend class UserRestore;
  struct Captured {
    std::any begin;  ///< empty if recomputes do not begin with it
    std::any left;   ///< contents that the function left in a written buffer; empty if not compared
    bool is_touched = false;  ///< a buffer that may have been written with the same contents
  };
  /// Returns the registrations to be changed; others that share them see no change.
  UserRegistrations& to_change();
  std::shared_ptr<const UserRegistrations> registered_;
  PlaceIndex places_;               // of the providers
  std::vector<Captured> captured_;  // in their order
  std::vector<std::unique_ptr<DrawLog>> draw_logs_;
  bool is_compared_ = false, has_replaced_ = false, has_begin_ = true;
};

/// Calls the observers when a recompute begins and, in the destructor, when it has ended.
class ObservedRecompute {
 public:
  ObservedRecompute(const UserState* state, const RegionInfo& region);
  ~ObservedRecompute();
  ObservedRecompute& operator=(ObservedRecompute&&) = delete;

 private:
  void tell_end() noexcept;
  const UserState* const state_;
  PhaseInfo phase_;
  std::size_t num_told_ = 0;
};

/// Note [Where recomputes begin]
/// A function that writes to buffers of its module is run again from their contents when forward
/// began, and must leave the contents that forward left. A function that remembers its writes in a
/// plain member (a table is filled once, and `filled` says so) does not do this. It is then run
/// again from the contents that forward left, and must not change those. If neither works, the
/// recompute is refused. The start that worked is remembered by module, and tried first next time.

/// Note [Written by a provider]
/// A provider that restores with `copy_` changes the version of a buffer that the region captured,
/// and guarantees that the buffer then has forward's contents. So the versions of such tensors are
/// restored for all graphs that saved them, and the capture check ignores their versions. Tensors
/// that the recompute saves of them are copied, as they are overwritten when it ends.

/// Sets the providers' state to forward's until `put_back`, which throws exceptions of a provider,
/// or until the destructor, which only warns, since another exception is being thrown.
class UserRestore {
 public:
  /// `captured`: known tensors from outside the region, see Note [Written by a provider]. Throws
  /// exceptions of a provider, after restoring the state before.
  UserRestore(const UserState* state, const LockOwner& owner,
              const std::vector<at::Tensor>& captured, StartsFrom start);
  ~UserRestore();
  UserRestore& operator=(UserRestore&&) = delete;
  /// Sets the first providers to these states in the middle of a recompute.
  void move_to(const std::vector<std::any>& states);
  void put_back();
  /// Returns whether the recompute has made all of forward's writes to buffers that are compared.
  bool has_written_all();
  /// Returns a buffer that the function, run again, did not leave as forward did; undefined if
  /// there is none.
  at::Tensor changed_buffer() const;
  /// Returns whether `now` has the contents that forward left in the buffer `in_forward`.
  bool is_as_left(const at::Tensor& in_forward, const at::Tensor& now) const;
  /// Returns whether another thread's recompute did not release a subject in time, so that nothing
  /// was restored.
  bool has_failed() const { return has_failed_; }
  /// Returns the storages of the captured tensors that a provider of the user's wrote to; null for
  /// none.
  const StorageSet* written() const {
    return watched_ == nullptr || watched_->written.is_empty() ? nullptr : &watched_->written;
  }

 private:
  void restore(StateProvider& provider, const std::any& state);
  void undo(bool may_throw);
  /// Returns the providers that must be free for a restore.
  static std::vector<const void*> restored_by(const UserState* state);
  const std::any& wanted(const UserState::Captured& captured) const {
    return start_ == StartsFrom::End && captured.left.has_value() ? captured.left : captured.begin;
  }
  const UserState* const state_;
  const StartsFrom start_;
  std::size_t num_written_ = 0;  // captured states whose writes have all been made
  const RecomputeHold hold_;
  std::vector<std::any> before_;
  c10::SmallVector<TrainingFlags::Hold, 1> flags_;
  struct Watched {
    std::vector<std::pair<at::Tensor, uint32_t>> captured;  // with versions
    StorageSet written;
  };
  std::unique_ptr<Watched> watched_;
  bool has_failed_;
};

}  // namespace remat
