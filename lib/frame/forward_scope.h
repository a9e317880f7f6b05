#pragma once
// The scope of a region's first run: makes slots, and notes facts that recomputes must know.

#include <c10/util/FunctionRef.h>

#include <atomic>
#include <memory>
#include <vector>

#include "lib/base/spin_lock.h"
#include "lib/frame/frame_scope.h"
#include "lib/seam/variable_hooks.h"

namespace remat {

class ForwardScope final : public FrameScope, public seam::NodeWatch {
 public:
  /// `around`: the scope of the region around, or null; `own`: registrations of this region itself.
  ForwardScope(c10::intrusive_ptr<Frame> frame, const detail::RegionScope* around,
               std::shared_ptr<const UserRegistrations> own);

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override;
  std::shared_ptr<const UserRegistrations> registered_state() const override { return own_; }
  OperatorHandler* operators() override {
    return keeps_here() ? frame().keeper()->operators() : nullptr;
  }
  detail::ReadWatcher* reads() override { return keeps_here() ? frame().keeper() : nullptr; }

  /// Waits for gradients that the engine's threads still hold, after the function has returned.
  /// See Note [Late threads of the engine].
  void wait_for_engine(c10::function_ref<void(TensorVisitor)> visit_result) {
    if (!gradients_.empty()) wait_for_gradients(visit_result);
  }

  // Watchers.
  bool is_watching() const override { return is_open(); }
  /// See Note [Captures that nothing saves].
  void node_asked(const at::TensorBase& tensor, const torch::autograd::Node*) override {
    frame().operands().note(tensor, frame().inputs());
  }
  void backward_begins(const torch::autograd::edge_list& roots,
                       const torch::autograd::edge_list& targets, bool accumulates) override;
  void backward_ended(const torch::autograd::variable_list& gradients,
                      const torch::autograd::variable_list& given) override;
  void hook_registered(const at::TensorBase& tensor, unsigned handle, bool is_new) override;
  DrawLog* draw_log(const c10::GeneratorImpl& generator) override {
    Surroundings& surroundings = frame().surroundings();
    return is_own_thread() && is_open() ? surroundings.draw_log_from_here(generator)
                                        : surroundings.draw_log(generator);
  }
  void guard_opened(const UserRegistrations& opened, const std::vector<std::any>& states) override {
    frame().surroundings().guard_opened(opened, states);
  }
  void statistics_moved(const c10::StorageImpl* statistics) override {
    frame().inputs().note_statistics(frame().region(), statistics);
  }

 private:
  void wait_for_gradients(c10::function_ref<void(TensorVisitor)> visit_result);
  bool may_drop_in_script();
  bool keeps_here() const { return is_own_thread() && frame().keeper() != nullptr; }

  const std::shared_ptr<const UserRegistrations> own_;
  SpinLock mutex_;
  std::vector<WeakStorage> gradients_;  // returned by inner backwards, on devices
  std::atomic<int64_t> num_backwards_{0};
  bool rest_is_plain_ = false;  // tensors saved from now on are not dropped
};

}  // namespace remat
