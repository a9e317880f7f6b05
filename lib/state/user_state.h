#pragma once
// What the guards of state.h registered around a region: captured, restored, told of recomputes.

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

/// Guards of state.h register these, outermost first; providers and generators once each, flags
/// once a subject.
struct UserRegistrations {
  std::vector<std::shared_ptr<StateProvider>> providers{};
  c10::SmallVector<std::shared_ptr<TrainingFlags>, 1> flags{};
  std::vector<at::Generator> generators{};
  std::vector<std::shared_ptr<const RecomputeObserver>> observers{};

  void add(const std::shared_ptr<StateProvider>& provider);
  void add(const at::Generator& generator);
  void add(const std::shared_ptr<TrainingFlags>& added);
  /// Adds all that the other has.
  void add(const UserRegistrations& other);
  /// Collects those of the guards, regions and recomputes around this point, then `own`, which may
  /// be null; null if there are none.
  static std::shared_ptr<const UserRegistrations> around(
      const std::shared_ptr<const UserRegistrations>& own);
};

/// While alive, user code runs as part of no region.
struct OutsideOfRegions {
  const detail::NoScopes no_scopes;
  const at::NoGradGuard no_grad;
};

/// A guard watcher is told of the guards of state.h that are opened inside a region.
class GuardWatcher {
 public:
  /// `states`: of its providers, as they are now; only of a first run.
  virtual void guard_opened(const UserRegistrations& opened,
                            const std::vector<std::any>& states) = 0;

 protected:
  ~GuardWatcher() = default;  // owned as something else
};

/// A scope that registers providers and flags; `tell_regions_around` gives the same to the regions
/// that are open already, as these things are now.
std::shared_ptr<detail::Scope> scope_that_registers(
    std::shared_ptr<const UserRegistrations> registrations);
void tell_regions_around(const UserRegistrations& registrations);

/// With which state of modules a recompute begins: Note [Where recomputes begin].
enum class StartsFrom { Begin, End };

/// A region keeps what was registered around it, and the providers' state when it began. Guards
/// that are opened inside the region add to it: what they guard is as it was then.
class UserState {
 public:
  UserState() : registered_(std::make_shared<UserRegistrations>()) {}
  /// Calls user code; throws what it throws. `registered`: each once.
  UserState(std::shared_ptr<const UserRegistrations> registered, bool preserves_rng);
  ~UserState();
  void keep(const std::shared_ptr<StateProvider>& provider, const std::any& state);
  void keep(const at::Generator& generator);
  void keep(const std::shared_ptr<TrainingFlags>& flags) { to_change().add(flags); }
  const UserRegistrations& registered() const { return *registered_; }
  std::shared_ptr<const UserRegistrations> share_registered() const { return registered_; }
  /// Whether it has a provider that is no module's.
  bool has_users_providers() const;
  /// What the providers capture now, in their order. Calls user code; throws what it throws.
  std::vector<std::any> states_now() const;
  /// The function has returned. Forgets the buffers that it left alone.
  /// See Note [Only what forward wrote].
  void settle();
  /// Returns whether the function wrote to buffers otherwise than batch norms do, and recomputes
  /// must leave them as it did.
  bool is_compared() const { return is_compared_; }
  /// Returns whether what they held when forward began is known.
  bool has_begin() const { return has_begin_; }
  /// Returns where recomputes may begin, the likelier start first.
  c10::SmallVector<StartsFrom, 2> starts() const;
  /// A recompute that began there has left what forward left.
  void remember(StartsFrom start) const;
  /// Each registered CPU generator has a log.
  const std::vector<std::unique_ptr<DrawLog>>& draw_logs() const { return draw_logs_; }

 private:
  friend class UserRestore;
  struct Captured {
    std::any begin;  ///< empty for what recomputes do not begin with
    std::any
        left;  ///< what the function left of a buffer that it wrote to; empty for what is not compared
    bool is_touched = false;  ///< a buffer that it may have written the same contents to
  };
  /// Returns the registrations, of which others that share them see no change.
  UserRegistrations& to_change();
  std::shared_ptr<const UserRegistrations> registered_;
  PlaceIndex places_;               // of the providers
  std::vector<Captured> captured_;  // in their order
  std::vector<std::unique_ptr<DrawLog>> draw_logs_;
  bool is_compared_ = false, has_replaced_ = false, has_begin_ = true;
};

/// Tells the observers that a recompute begins, and when destroyed that it has ended.
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
/// A function that writes to buffers of its module is run again from what they held when forward
/// began, and must leave what forward left. One that remembers in a plain member what it has done
/// (a table is filled once, `filled` says so) does not do so: then it is run again from what
/// forward left, and must leave that alone. If it does neither, the recompute is refused. Which of
/// the two held is remembered by module, to be tried first.

/// Note [Written by a provider]
/// A provider that restores with `copy_` moves the version of a buffer that the region captured,
/// and it is the provider's word that the buffer then is what forward saw. So the versions of such
/// tensors are put back, for all graphs that saved them; the capture check does not look at their
/// versions; and what the recompute saves of them is copied, as they will be overwritten when it
/// ends.

/// The providers' state is the forward's until `put_back`, which throws what a provider throws; or
/// until the destructor, which only warns, since something else is being thrown.
class UserRestore {
 public:
  /// `captured` are known tensors from outside the region: Note [Written by a provider].
  /// Throws what a provider throws, having put back what was restored before.
  UserRestore(const UserState* state, const LockOwner& owner,
              const std::vector<at::Tensor>& captured, StartsFrom start);
  ~UserRestore();
  UserRestore& operator=(UserRestore&&) = delete;
  /// The providers' states become these, of the first of them: in the middle of a recompute.
  void move_to(const std::vector<std::any>& states);
  void put_back();
  /// Returns whether the recompute has made all of forward's writes to buffers that are compared.
  bool has_written_all();
  /// The function has run again: a buffer that it did not leave as forward did; undefined if there
  /// is none.
  at::Tensor changed_buffer() const;
  /// Returns whether `now` is what forward left in a buffer that it added.
  bool is_as_left(const at::Tensor& in_forward, const at::Tensor& now) const;
  /// Another thread's recompute did not give something free in time: nothing was restored.
  bool has_failed() const { return has_failed_; }
  /// The storages of the captured tensors that a provider of the user's wrote to; null for none.
  const StorageSet* written() const {
    return watched_ == nullptr || watched_->written.is_empty() ? nullptr : &watched_->written;
  }

 private:
  void restore(StateProvider& provider, const std::any& state);
  void undo(bool may_throw);
  /// Returns the providers that must be free for it.
  static std::vector<const void*> restored_by(const UserState* state);
  const std::any& wanted(const UserState::Captured& captured) const {
    return start_ == StartsFrom::End && captured.left.has_value() ? captured.left : captured.begin;
  }
  const UserState* const state_;
  const StartsFrom start_;
  std::size_t num_written_ = 0;  // of the captured states, whose writes have all been made
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
