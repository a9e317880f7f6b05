#pragma once
// The recorder of a region's forward: keeps results by the answers of a policy.
//
// Note [Selective checkpointing]
// While a region with a policy runs, each operator arrives here below autograd
// (Note [Seeing operators]). The innermost region decides: its policy is asked once per call, and
// the call runs. Kept results belong to the frame, and its recomputes replay them (replay.h).
// Enclosing regions only count the call, so that they know the origin of its results. Operators
// that write or return views always run again (policy.h).
//
// `pin` and `save_region` keep pins instead of calls, numbered in their own order, and need no
// policy.

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lib/frame/frame.h"
#include "lib/frame/keeper.h"
#include "lib/selective/held_for_names.h"
#include "lib/selective/kept_moves.h"
#include "lib/selective/kept_record.h"
#include "lib/selective/operator_handler.h"
#include "lib/selective/policy_rule.h"

namespace remat {

class Selection final : public Keeper, public OperatorHandler {
 public:
  /// Makes a selection. `rule` may be null: then only pins are kept.
  Selection(Frame& frame, std::shared_ptr<const PolicyRule> rule);
  /// Returns the selection of a frame; null if it keeps nothing.
  static Selection* of(const Frame& frame) { return static_cast<Selection*>(frame.keeper()); }
  /// Returns the selection of a frame, and makes it if necessary.
  static Selection& make(Frame& frame, std::shared_ptr<const PolicyRule> rule = nullptr);

  /// Returns the policy's rule; null if only pins are kept.
  const PolicyRule* rule() const { return rule_; }

  // Functions for pins in forward, by number.
  int64_t begin_pin();
  /// Sets a pin. The results of a save_region do not count as needed for its own slots.
  void keep_pin(int64_t number, std::shared_ptr<PinRecord> pin);
  /// Returns the place for a value that a policy with this answer keeps.
  KeptPlace place_of(const at::Tensor& value, CheckpointPolicy answer);
  /// Returns a kept value, which gets the number `output` in the pin.
  PinRecord::Value keep_value(const at::Tensor& value, int64_t number, std::size_t output,
                              const detail::RegionScope& region, const KeptPlace& place = {});
  void name(const at::Tensor& value, const std::string& name, const detail::RegionScope& region);

  // Functions of OperatorHandler.
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack,
           const detail::RegionScope& region, bool is_outermost) override;
  int64_t before_inner(const c10::OperatorHandle& op,
                       c10::ArrayRef<c10::IValue> arguments) override;
  void after_inner(const c10::OperatorHandle& op, int64_t call, c10::ArrayRef<c10::IValue> results,
                   const StoragesOf& given) override;

  // Functions of Keeper.
  OperatorHandler* operators() override { return this; }
  void tensor_was_read(const at::Tensor& tensor) override;
  void value_was_handed_over(const at::Tensor& value, int64_t region, int64_t position) override;
  void slot_added(const at::Tensor& saved, int64_t position) override;
  void backward_begins() override { num_inside_.fetch_add(1, std::memory_order_relaxed); }
  bool holds(const c10::StorageImpl* storage) override;
  bool may_replace(const c10::StorageImpl* storage) override;
  void end_naming() override;
  void settle() override;
  void add_to(recording::RegionSums& sums) const override;
  std::unique_ptr<KeptReplay> begin_recompute(Filler& filler,
                                              const std::vector<at::Tensor>& inputs) override;

 private:
  struct Call;
  void decide(Call& call, Freed& freed);
  void keep(CallRecord& record, c10::ArrayRef<c10::IValue> results, CheckpointPolicy answer,
            const detail::RegionScope& region, detail::HooksAround hooks);
  bool keep_named(const at::Tensor& value, CheckpointPolicy answer,
                  const detail::RegionScope& region);

  Frame& frame_;
  const PolicyRule* const rule_;     ///< null: only pins are kept
  const detail::HooksAround hooks_;  ///< through which kept tensors are saved
  std::optional<KeptMoves> moves_;   ///< empty without a rule
  KeptRecord record_;
  /// Number of slots, pins and backwards so far, which a recompute must reach again.
  std::atomic<int64_t> num_inside_{0};
  // Members for the time while the forward runs:
  HeldForNames held_for_names_;
  std::vector<std::optional<ValueSources::Made>> slot_sources_;  // by position
  std::size_t calls_at_last_save_ = 0;                           // of all operators
  std::size_t pins_at_last_save_ = 0;
  /// The policy's answer in a recorded region, and why it could not be followed (null if it was).
  struct Decision {
    KeptIndex call;
    CheckpointPolicy answer;
    const char* against;
  };
  std::vector<Decision> decisions_;
};

/// Returns a policy's answer for a save_region with that name; MustSave without a policy, and for
/// one that has no names.
CheckpointPolicy answer_for_region(const PolicyRule* rule, const std::string& name,
                                   const std::vector<at::Tensor>& arguments);

/// Keeps the argument of `pin` or of a name, as the pin `number`.
void keep_itself(Selection& selection, const at::Tensor& value, int64_t number,
                 const detail::RegionScope& region, const KeptPlace& place, bool is_name);

}  // namespace remat
