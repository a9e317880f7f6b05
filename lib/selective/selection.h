#pragma once
// The keeper of a region's results: stores results of its forward by the answers of a policy.
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

  const PolicyRule* rule() const { return rule_.get(); }
  /// Returns whether any result may be kept later, after other operators have read it.
  bool looks_at_names() const { return rule_ != nullptr && rule_->looks_at_names(); }
  const KeptRecord& record() const { return record_; }
  /// Begins the loads for a recompute.
  void begin_loads() const {
    if (moves_) moves_->begin_loads();
  }

  // Functions for pins in forward, by number.
  int64_t begin_pin();
  void keep_pin(int64_t number, std::shared_ptr<PinRecord> pin);
  /// Keeps the argument of `pin` or of a name, as a pin.
  void keep_itself(const at::Tensor& value, int64_t number, const detail::RegionScope& region,
                   const KeptPlace& place, bool is_name);
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
  struct ResultIndex {
    uint32_t op, call, result, tensor;
  };
  /// Objects that are released under the lock and freed after it: declare it before the lock.
  struct Freed {
    std::vector<c10::SmallVector<KeptResult, 1>> results;
    std::vector<at::Tensor> held;
    std::vector<CallRecordPtr> records;
  };
  struct Call;
  Call begin_call(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  void answer(Call& call, std::unique_lock<SpinLock>& lock);
  void decide(Call& call, Freed& freed);
  void apply(Call& call, bool opened_regions, std::unique_lock<SpinLock>& lock, Freed& freed);
  uint32_t number(const c10::OperatorHandle& op);
  CallRecordPtr make_record();
  void describe(c10::ArrayRef<c10::IValue> arguments, CallRecord& record);
  void describe(const at::Tensor& tensor, ArgumentRecord& record);
  int64_t input_of(const c10::StorageImpl* storage) const;
  void note_read(c10::ArrayRef<c10::IValue> arguments);
  void note_written(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                    Freed& freed);
  void note_read(const c10::StorageImpl* storage);
  void note_written(const ResultIndex& place, Freed& freed);
  void note_results(const OpRecord& op, uint32_t number, uint32_t call,
                    c10::ArrayRef<c10::IValue> results, const StoragesOf& given);
  bool returns_argument(const CallRecord& call, c10::ArrayRef<c10::IValue> results) const;
  void keep(CallRecord& record, c10::ArrayRef<c10::IValue> results, CheckpointPolicy answer,
            const detail::RegionScope& region, detail::HooksAround hooks);
  void add_places(uint32_t op, uint32_t call, const CallRecord& record);
  /// Records that a call should have been kept and is not.
  void note_let_go(uint32_t op, uint32_t call);
  /// Returns whether an operator writes to a kept result that stays kept as written.
  bool writes_to_kept(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                      Freed& freed);
  ResultIndex* kept_result(const c10::StorageImpl* storage);
  void let_go(const ResultIndex& place, Freed& freed);
  void hold_for_name(const ResultIndex& call, CallRecord& record,
                     c10::ArrayRef<c10::IValue> results);
  void look_through_held(Freed& freed);
  bool keep_named(const at::Tensor& value, CheckpointPolicy answer,
                  const detail::RegionScope& region);
  void let_go(const at::Tensor& value);
  KeptPlace place_of(const at::Tensor& value, CheckpointPolicy answer, bool is_beside);
  bool is_alive_anyway(const at::Tensor& value) const;
  void end_forward(std::vector<KeptTensor::Unfinished>& unfinished);
  void let_go_of_unread(Freed& freed);
  bool sees_writers(const detail::RegionScope& region) const;
  detail::HooksAround hooks() const;

  Frame& frame_;
  const std::shared_ptr<const PolicyRule> rule_;
  const int64_t task_at_start_;
  std::optional<KeptMoves> moves_;  ///< empty without a rule
  KeptRecord record_;
  /// Number of slots, pins and backwards so far, which a recompute must reach again.
  std::atomic<int64_t> num_inside_{0};
  // Members for the time while the forward runs:
  ValueSources sources_;                   // queried by settle_provenance
  std::vector<ResultIndex> kept_results_;  // by the number in a storage's notes
  std::size_t calls_at_last_save_ = 0;     // of all operators
  std::vector<std::optional<ValueSources::Made>> slot_sources_;  // by position
  std::vector<ResultIndex> holding_;  // calls with results held for names
  /// The policy's answer in a recorded region, and why it could not be followed (null if it was).
  struct Decision {
    uint32_t op, call;
    CheckpointPolicy answer;
    const char* against;
  };
  std::vector<Decision> decisions_;
};

}  // namespace remat
