#pragma once
// The scope of a recompute, alone on the stack while the function runs again.

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "lib/base/recompute_lock.h"
#include "lib/frame/filler.h"
#include "lib/frame/frame_scope.h"
#include "lib/frame/outside_tensors.h"
#include "lib/rng/recompute_draws.h"
#include "lib/state/early_guards.h"

namespace remat {

class RecomputeScope final : public FrameScope {
 public:
  RecomputeScope(c10::intrusive_ptr<Frame> frame, Filler& filler);

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override;
  OperatorHandler* operators() override {
    return replay_ && is_own_thread() ? replay_->operators() : nullptr;
  }
  std::shared_ptr<const UserRegistrations> registered_state() const override {
    return frame().surroundings().user_state()->share_registered();
  }

  // The state of this recompute.
  void begin(const std::vector<at::Tensor>& inputs);
  /// Non-null while the function runs.
  void set_outside(OutsideTensors* outside) { outside_ = outside; }
  /// Non-null while the function runs.
  void set_user_restore(UserRestore* restore) { user_restore_ = restore; }
  void move_providers(const std::vector<std::any>& states) override;
  int64_t training_level() const override { return *frame().region().extras->training_level; }
  /// The replay is null if nothing is kept.
  KeptReplay* replay() const { return replay_.get(); }
  RecomputeDraws& random() { return draws_; }
  /// Returns the guards opened ahead of the waiting forward, to be put back when the function has
  /// ended.
  EarlyGuards& early_guards() { return early_guards_; }
  const LockOwner& own_lock() const { return own_lock_; }

  // Watchers.
  void backward_begins(const torch::autograd::edge_list& roots,
                       const torch::autograd::edge_list& targets, bool accumulates) override;
  std::optional<unsigned> known_hook(const at::TensorBase& tensor) override;
  void hook_registered(const at::TensorBase& tensor, unsigned handle, bool is_new) override;
  void requires_grad_changes(const at::TensorBase& tensor) override;
  const seam::NodePtr* gradient_sink(const at::TensorBase& tensor) override;
  DrawReplay* draw_replay(const c10::GeneratorImpl& generator) override;
  void guard_opened(const UserRegistrations& opened, const std::vector<std::any>&) override;

 private:
  template <class Throw>
  void refuse(Throw&& refusal);

  Filler& filler_;
  OutsideTensors* outside_ = nullptr;
  UserRestore* user_restore_ = nullptr;
  std::unique_ptr<GradientSinks> sinks_;  // null in most recomputes
  std::unique_ptr<KeptReplay> replay_;
  RecomputeDraws draws_;
  EarlyGuards early_guards_;
  std::vector<WeakEdge> aliases_;  // of the inputs, if a backward of forward's asked for one
  std::atomic<int64_t> num_backwards_{0};
  const LockOwner own_lock_;
};

}  // namespace remat
