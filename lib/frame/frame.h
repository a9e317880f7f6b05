#pragma once
// One run of checkpoint(): its inputs, slots, state and recomputes.
//
// Note [The rules]
// The semantics of a frame, in the words of this library. A slot is the place of one tensor that
// autograd saved in the region; a task is one backward pass.
//  1. Innermost owns: a tensor saved in nested frames is a slot of the innermost only (hook_stack).
//  2. Inputs are the parent's saves: they are saved before the frame's own hook (inputs).
//  3. A recompute starts clean: its scope is alone on the stack (hook_stack, StackSwap).
//  4. Unpacked is released; the rest goes when the task ends (Frame::read_slot, task).
//  5. Early stop (recompute).
//  6. Backward inside the region: recomputed graphs keep their own tensors (hooks/collect).
//  7. One recompute per frame and task; no lock is held while the function runs (Frame::read_slot).
//  8. A read outside backward recomputes for that read alone (Frame::read_alone).
//  9. Reading twice recomputes again, or throws with strict_unpack (Frame::read_slot).
// 10. A mismatch is never silent (match, capture).
// 11. State: (snapshot, draws, device_rng, streams, user_state).
// 12. Failure is clean: everything a run holds unwinds (recompute).
// 13. Lifetime: slots own the frame, nothing else does; destruction never recurses
//     (Frame::empty).
// 14. Accumulation once: recomputed graphs are never executed by the outer backward.
// 15. Selective checkpointing (selection, replay).
// 16. Plays with others: (engine_seam, hook_stack).

#include <fmt/format.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "hooks/slot.h"
#include "lib/base/spin_lock.h"
#include "lib/frame/gradient_sinks.h"
#include "lib/frame/inner_backward.h"
#include "lib/frame/inputs.h"
#include "lib/frame/outside_tensors.h"
#include "lib/frame/recomputed_values.h"
#include "lib/frame/slot.h"
#include "lib/frame/task.h"
#include "lib/observe/op_log.h"
#include "lib/observe/recording.h"
#include "lib/rng/device_rng.h"
#include "lib/rng/draws.h"
#include "lib/state/snapshot.h"
#include "lib/state/user_state.h"
#include "lib/tensor/capture.h"
#include "remat/checkpoint.h"

namespace remat {

class PolicyRule;
class Selection;

/// The options in force for a frame, guards applied.
struct FrameOptions {
  bool early_stop = true, debug = false, preserve_rng_state = true, strict_unpack = false;
  bool offload_inputs = false;
  DeterminismCheck determinism_check = DeterminismCheck::Metadata;
  CaptureCheck capture_check = CaptureCheck::Raise;
  /// What guards around the region said, for the regions inside its recompute.
  std::optional<bool> early_stop_guard{}, debug_guard{};
};

/// What only some frames have.
struct FrameExtras {
  std::string name;
  std::function<std::string(const at::Tensor&)> fingerprint;
  ContextPair contexts;
  OpLog forward_log;
  /// Of each slot in debug mode: the number of the operator that saved it.
  std::vector<int64_t> saved_by;
};

class Frame final : public SlotOwner {
 public:
  Frame(const FrameOptions& options, std::unique_ptr<FrameExtras> extras, int64_t depth);
  ~Frame() override;

  /// Saves the region's inputs through the hooks around it and takes the snapshot.
  void begin(std::unique_ptr<detail::RegionBody> body);
  /// The region's function has returned: judges what was saved.
  void settle(c10::function_ref<void(detail::TensorVisitor)> visit_result);

  int64_t add_slot(const at::Tensor& saved) override;
  at::Tensor read_slot(int64_t position) override;
  void drop_slot(int64_t position) noexcept override;
  HeldInfo describe_slot(int64_t position) override;
  void end_task(const TaskKey& task) noexcept;

  int64_t id() const { return id_; }
  int64_t depth() const { return depth_; }
  const std::string& name() const;
  const FrameOptions& options() const { return options_; }
  FrameExtras* extras() const { return extras_.get(); }
  const Snapshot& snapshot() const { return snapshot_; }
  /// Whether operators came to run_selectively in the first run. LibTorch's formulas ask whether they
  /// do (isTensorSubclassLike) and save other tensors then, so it must be the same in recomputes.
  bool sees_operators() const { return sees_operators_; }
  void set_sees_operators(bool sees) { sees_operators_ = sees; }
  /// Where the first run of the function began.
  const RegionStart& start() const { return start_; }
  /// What a policy, pin or save_region keeps; null if there is none of them.
  Selection* selection() const { return selection_.get(); }
  Selection& selection_or_make(std::shared_ptr<const PolicyRule> rule = nullptr);
  const Inputs& inputs() const { return inputs_; }
  /// The next slot follows none. A recompute builds more nodes in this place than forward, or fewer: it
  /// has other recomputes in a backward, and values of pins instead of what made them.
  void end_operator();
  /// A backward of the forward inside the region, by number.
  void note_backward(int64_t number, InnerBackwards::Asked asked);
  InnerBackwards::Asked asked_by_backward(int64_t number);
  bool has_noted_backwards();
  /// Whether the function has run any backward in forward.
  bool has_run_backward() const { return has_run_backward_.load(std::memory_order_relaxed); }
  void note_any_backward() { has_run_backward_.store(true, std::memory_order_relaxed); }
  /// The function accumulates in forward: Note [Accumulating once].
  void note_accumulation(const torch::autograd::edge_list& roots);
  AccumulatedLeaves accumulated_leaves();
  /// Hooks that the function registers in forward: Note [Tensors from outside].
  void note_hook(const at::TensorBase& tensor, unsigned handle);
  std::optional<HookNotes::Note> noted_hook(const at::TensorBase& tensor, std::size_t number);
  bool has_hook_after_backward();
  /// The tensors from outside that are known and alive.
  void visit_outside(c10::function_ref<void(at::Tensor)> visitor);
  /// Of all generators whose draws are noted, always in the same order.
  c10::SmallVector<DrawLog*, 1> draw_logs();
  /// Where draws from a generator are noted; null if they do not matter.
  DrawLog* draw_log(const c10::GeneratorImpl& generator);
  DeviceRng* device_rng() const { return device_rng_.get(); }
  /// Whether a slot stands for a tensor with this storage.
  bool has_slot_of(const c10::StorageImpl* storage);
  /// So far.
  DevicesMet devices_met();
  /// What a recompute sets the generators of devices to.
  std::vector<GeneratorState> device_states_at_begin();
  const CurrentStreams* streams() const { return streams_.get(); }
  /// A guard of state.h was opened inside the region, on the forward's thread.
  void keep(const std::shared_ptr<StateProvider>& provider, const std::any& state);
  void keep(const at::Generator& generator);
  void keep(const std::shared_ptr<HeldState>& held_state);
  /// Null if no guard of state.h was around or in the region.
  const UserState* user_state() const { return user_state_.get(); }
  /// Null if no recorder was alive when the region began.
  RecordedFrame* recorded() const { return recorded_.get(); }
  /// The function threw; `settle` does the same where it has returned.
  void tell_recorders_of_throw() const;
  detail::RegionBody& body() const { return *body_; }
  GivenInputs unpack_inputs() const { return inputs_.unpack(*this); }
  std::thread::id forward_thread() const { return forward_thread_; }
  /// Whether the contents of all slots are compared.
  bool compares_contents() const;
  /// What the recompute must meet in a slot, if its contents are compared. Call it in `with_slot`.
  std::optional<std::string> expected_contents(int64_t position) const;
  /// What is compared of a tensor's contents: a digest, or the user's fingerprint.
  std::string contents_of(const at::Tensor& tensor) const;

  /// What a recompute needs to know of the slots, taken at its start.
  struct SlotView {
    c10::SmallVector<char, 48> is_needed;  ///< by position
    int64_t last_needed = -1, num_needed = 0;
    bool is_settled = false;      ///< the forward has returned
    bool ends_small = false;      ///< what a stop after the last slot would skip is next to nothing
    bool has_own_output = false;  ///< some operator saves its own output
  };
  SlotView view_for(int64_t only_position);
  /// A slot; once the frame is settled only `is_alive` changes, before that slots move.
  template <class Fn>
  void with_slot(int64_t position, bool is_settled, Fn&& fn) {
    std::unique_lock<SpinLock> lock(mutex_, std::defer_lock);
    if (!is_settled) lock.lock();
    fn(slots_[static_cast<std::size_t>(position)]);
  }

  /// The thread that fills `run` is about to wait for a backward: wakes the threads that wait.
  void owner_waits_for_backward(Run& run);

 private:
  friend class c10::intrusive_ptr<Frame>;
  // LibTorch calls it when the last strong reference goes, but only if weak ones remain.
  void release_resources() override { empty(); }
  void empty() noexcept;
  struct Remains;
  bool has_new_drawer() const;
  at::Tensor read_alone(int64_t position);
  Value take_or_copy(Run& run, int64_t position, const Task& task);
  bool is_fresh(const Run& run) const;
  void hash_pending(uint64_t next_operator, bool is_end);
  void settle(const StorageSet& results, int64_t tail_elements);
  void settle_provenance(const StorageSet& results);
  void settle_operators();
  recording::RegionSums sums(const StorageSet& results) const;

  const int64_t id_, depth_;
  const FrameOptions options_;
  std::unique_ptr<FrameExtras> extras_;
  std::unique_ptr<detail::RegionBody> body_;
  Inputs inputs_;
  Snapshot snapshot_;
  DrawLog draws_{default_cpu_generator()};
  std::unique_ptr<CurrentStreams> streams_;
  std::unique_ptr<DeviceRng> device_rng_;
  std::unique_ptr<UserState> user_state_;
  std::unique_ptr<Selection> selection_;
  std::unique_ptr<RecordedFrame> recorded_;
  RegionStart start_;
  bool sees_operators_ = false;
  std::atomic<bool> has_run_backward_{false};
  std::thread::id forward_thread_;

  SpinLock mutex_;  // guards what follows; never held while user code runs
  std::vector<Slot> slots_;
  c10::SmallVector<std::shared_ptr<Run>, 1> runs_;
  /// What few functions do in forward.
  struct Noted {
    std::optional<InnerBackwards> backwards{};  ///< those that asked for something
    HookNotes hooks{};
    AccumulatedLeaves accumulated{};
  };
  Noted& noted();
  std::unique_ptr<Noted> noted_;
  bool is_operator_over_ = false;
  bool may_meet_outside_ = true;  ///< a slot or an input is, or may be, a tensor from outside
  bool is_settled_ = false;
  bool ends_small_ = false;
  bool is_empty_ = false;
  std::vector<std::pair<int64_t, at::Tensor>> pending_;  // contents are taken when safe
  std::vector<std::optional<std::string>> contents_;     // of the slots, where they are compared
};

}  // namespace remat
