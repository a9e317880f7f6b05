#pragma once
// One run of checkpoint(): joins a region's inputs, surroundings, slots and recomputed values.
//
// Note [The rules]
// The semantics of a frame, in the words of this library. A slot is the place of one tensor that
// autograd saved in the region; a task is one backward pass.
//  1. Innermost owns: a tensor saved in nested frames is a slot of the innermost only (slots,
//     hook_stack).
//  2. Inputs are the parent's saves: they are saved before the frame's own hook (inputs).
//  3. A recompute starts clean: its scope is alone on the stack (hook_stack, StackSwap).
//  4. Unpacked is released; the rest goes when the task ends (values_by_task, task).
//  5. Early stop (filler).
//  6. Backward inside the region: recomputed graphs keep their own tensors (hooks/collect).
//  7. One recompute per frame and task; no lock is held while the function runs (values_by_task).
//  8. A read outside backward recomputes for that read alone (Frame::read_slot).
//  9. Reading twice recomputes again, or throws with strict_unpack (values_by_task).
// 10. A mismatch is never silent (filler, tensor_check, capture).
// 11. State: (surroundings, draws, device_rng, streams, user_state).
// 12. Failure is clean: everything a recompute holds unwinds (recompute).
// 13. Lifetime: slots own the frame, nothing else does; destruction never recurses
//     (Frame::release_resources).
// 14. Accumulation once: recomputed graphs are never executed by the outer backward.
// 15. Selective checkpointing (keeper, and lib/selective).
// 16. Plays with others: (engine, hook_stack).

#include <memory>
#include <typeinfo>

#include "lib/frame/captured_operands.h"
#include "lib/frame/forward_notes.h"
#include "lib/frame/inputs.h"
#include "lib/frame/keeper.h"
#include "lib/frame/region.h"
#include "lib/frame/slots.h"
#include "lib/frame/task.h"
#include "lib/frame/values_by_task.h"
#include "lib/state/surroundings.h"

namespace remat {

class Frame final : public TaskMember {
 public:
  /// `type` names the region if the extras have no name; `type`, `around` and `file` may be null.
  Frame(const RegionOptions& options, std::unique_ptr<RegionExtras> extras,
        const RegionInfo* around, const std::type_info* type, const char* file);
  ~Frame() override;

  /// Saves the region's inputs through the hooks around it, and notes its surroundings. `own`: the
  /// region's own registrations, or null. If that completes a recompute around this region, throws
  /// that recompute's stop or, if the caller `sees_end` and no stop is needed, returns false.
  bool begin(std::unique_ptr<RegionBody> body, bool sees_end,
             const std::shared_ptr<const UserRegistrations>& own);
  /// Returns the body again, if the region did not begin.
  std::unique_ptr<RegionBody> take_body() { return std::move(region_.body); }
  /// Classifies the saved tensors. Call it when the region's function has returned.
  void settle(c10::function_ref<void(TensorVisitor)> visit_result);

  int64_t add_slot(const at::Tensor& saved) override;
  at::Tensor read_slot(int64_t position) override;
  void drop_slot(int64_t position) noexcept override;
  HeldInfo describe_slot(int64_t position) override;
  void end_task(const TaskKey& task) noexcept override;

  // Parts of the frame, for its recomputes and its keeper.
  const Region& region() const { return region_; }
  Inputs& inputs() { return inputs_; }
  Surroundings& surroundings() { return surroundings_; }
  Slots& slots() { return slots_; }
  const RegionStart& start() const { return start_; }
  CapturedOperands& operands() { return operands_; }
  ForwardNotes& notes() { return notes_; }
  ValuesByTask& values() { return values_; }
  /// The keeper is null if nothing is kept. Set once, in forward.
  Keeper* keeper() const { return keeper_.get(); }
  void set_keeper(std::unique_ptr<Keeper> keeper) { keeper_ = std::move(keeper); }
  /// The record is null if no recorder was alive when the region began.
  RecordedFrame* recorded() const { return recorded_.get(); }

  /// Returns the devices of the inputs and of the tensors that autograd has saved so far.
  DevicesMet devices_met() const;
  /// Visits the tensors from outside that are known and alive.
  void visit_outside(c10::function_ref<void(at::Tensor)> visitor) const;

 private:
  friend class c10::intrusive_ptr<Frame>;
  // Called by LibTorch when the last strong reference is released, but only if weak ones remain.
  void release_resources() override;
  at::Tensor hand_over(int64_t position, Value&& value);

  Region region_;
  Inputs inputs_;
  Surroundings surroundings_;
  std::unique_ptr<Keeper> keeper_;
  std::unique_ptr<RecordedFrame> recorded_;
  RegionStart start_;
  Slots slots_;
  bool is_empty_ = false;
  ValuesByTask values_;
  ForwardNotes notes_;
  CapturedOperands operands_;
};

}  // namespace remat
