#pragma once
// What a region keeps of its forward instead of computing it again, and who decided so.
//
// Note [Selective checkpointing]
// While a region with a policy runs, each operator comes here below autograd, as operator_sight.h says
// (Note "Seeing operators"). The innermost region decides: its policy is asked once per call, and the call runs.
// What is kept belongs to the frame and is replayed by its recomputes (replay.h). Regions around only
// count the call, so that they know where its results come from. Operators that write or return
// views always run again (policy.h).
//
// `pin` and `save_region` keep pins instead of calls, numbered in their own order, and need no
// policy.

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <typeinfo>
#include <vector>

#include "lib/base/slab.h"
#include "lib/base/spin_lock.h"
#include "lib/observe/recording.h"
#include "lib/scope/hook_stack.h"
#include "lib/selective/call_record.h"
#include "lib/selective/kept_gradients.h"
#include "lib/selective/policy_rule.h"
#include "lib/selective/value_sources.h"

namespace remat {

class Frame;

/// Handles an operator of this thread; a callback of operator_sight.
void run_selectively(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// While a pack function of the user's runs inside a region. It may read what it packs, and what it
/// made of that, past all operators, and whoever unpacks may, too: a placeholder would not do. So the
/// former counts as read, and of the latter nothing is kept; its calls are counted as all others.
class Packing {
 public:
  explicit Packing(const at::Tensor& saved);
  ~Packing();
  Packing(const Packing&) = delete;
  Packing& operator=(const Packing&) = delete;
  static bool is_under_way();
};

/// One call of pin() or save_region(), or of checkpoint_name() where the value itself is kept.
struct PinRecord {
  struct Value {
    KeptTensor tensor;
    GradRole role;
    std::optional<ValueSources::Made> made{};
    KeptHistory history{};
  };
  const std::type_info* type = nullptr;
  std::shared_ptr<void> emptied;
  std::vector<Value> values;
  DrawSkips draws;
  std::vector<WeakTensor> leaves;  ///< that gradients of the values lead to
  bool is_kept = false;
  bool is_name = false;  ///< checkpoint_name's: the value that a recompute has does as well
};

/// Where a result waits that a policy keeps.
KeptWhere where_for(CheckpointPolicy answer);

class Selection {
 public:
  /// `rule` may be null: then there are only pins.
  Selection(Frame& frame, std::shared_ptr<const PolicyRule> rule);

  // In forward. `region`: the scope of the frame's first run.
  // `is_outermost`: there is none around it.
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack, const detail::Scope& region,
           bool is_outermost);
  /// A region inside decides about this operator; it runs between the two.
  int64_t before_inner(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);
  void after_inner(const c10::OperatorHandle& op, int64_t call, c10::ArrayRef<c10::IValue> results,
                   const StoragesOf& given);
  /// Autograd saved it in the region; `position`: its slot, or -1.
  void note_saved(const at::Tensor& saved, int64_t position = -1);
  /// A backward inside the region got it: the value of that slot, or (-1) of a region inside.
  void note_handed_over(const at::Tensor& value, int64_t position);
  /// A backward begins in the region.
  void note_backward() { num_inside_.fetch_add(1, std::memory_order_relaxed); }
  void name(const at::Tensor& value, const std::string& name, const detail::Scope& region);

  /// The number of a new pin; what it keeps is put in when it has run.
  int64_t begin_pin();
  void keep_pin(int64_t number, std::shared_ptr<PinRecord> pin);
  DrawMarks marks() const;
  /// `met`: the devices of what the pin returned, and read.
  DrawSkips since(const DrawMarks& marks, const DevicesMet& met) const;
  /// `number`: of the pin, `output`: of the value in it.
  PinRecord::Value keep_value(const at::Tensor& value, int64_t number, std::size_t output,
                              const detail::Scope& region, KeptWhere where = KeptWhere::InPlace);

  /// For recorders, once the forward is over: what is kept, and where.
  void add_to(recording::RegionSums& sums) const;
  /// The forward is over: what was held in case it gets a name is nobody's. Before anyone asks what is
  /// gone.
  void end_naming();
  /// Lets go of what no recompute will read.
  void settle();

  // In recomputes.
  const PolicyRule* rule() const { return rule_.get(); }
  /// Whether a recompute has to look at operators.
  bool has_calls() const { return num_kept_ > 0 || (rule_ && rule_->options().ask_again); }
  bool has_pins() const { return !pins_.empty(); }
  bool is_settled() const { return is_settled_; }
  /// Then any result may be kept later, when others have read it.
  bool looks_at_names() const { return rule_ != nullptr && rule_->looks_at_names(); }
  /// The lock is needed until the forward is over.
  std::unique_lock<SpinLock> lock() const;
  const std::vector<OpRecord>& operators() const { return operators_; }
  const std::vector<uint32_t>& sequence() const { return sequence_; }
  const std::vector<std::shared_ptr<PinRecord>>& pins() const { return pins_; }
  /// The number of an operator, or -1 if forward did not call it.
  int64_t number_of(const c10::OperatorHandle& op) const;
  /// A placeholder was read: from now on these calls run in recomputes.
  void run_placeholders_for_real();

  /// Whether it keeps the storage alive.
  bool holds(const c10::StorageImpl* storage);
  /// Whether what the region keeps has this storage, and may come back with another one.
  bool keeps(const c10::StorageImpl* storage);

 private:
  struct ResultIndex {
    uint32_t op, call, result, tensor;
  };
  /// Let go of while the lock is held, freed when it is not: declare it before the lock.
  struct Freed {
    std::vector<c10::SmallVector<KeptResult, 1>> results;
    std::vector<KeptTensor::Holders> holders;
    std::vector<at::Tensor> held;
    std::vector<CallRecordPtr> records;
  };
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
  static void keep(CallRecord& record, c10::ArrayRef<c10::IValue> results, CheckpointPolicy answer,
                   const detail::Scope& region, detail::HooksAround hooks);
  void add_places(uint32_t op, uint32_t call, const CallRecord& record);
  /// A call was to be kept, and is not.
  void note_let_go(uint32_t op, uint32_t call);
  /// An operator is about to write: whether what it writes to is kept, and stays kept as written.
  bool writes_to_kept(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                      Freed& freed);
  ResultIndex* kept_result(const c10::StorageImpl* storage);
  void let_go(const ResultIndex& place, Freed& freed);
  void hold_for_name(const ResultIndex& call, CallRecord& record,
                     c10::ArrayRef<c10::IValue> results);
  void look_through_held(Freed& freed);
  bool keep_named(const at::Tensor& value, CheckpointPolicy answer, const detail::Scope& region);
  void let_go(const at::Tensor& value);
  detail::HooksAround hooks() const;

  Frame& frame_;
  const std::shared_ptr<const PolicyRule> rule_;
  const int64_t task_at_start_;
  mutable SpinLock
      mutex_;  // guards what follows until the forward is over; each call takes it twice
  std::atomic<bool> is_settled_{false};
  Slab<CallRecord> slab_;  // outlives what follows
  std::vector<OpRecord> operators_;
  ska::flat_hash_map<c10::OperatorHandle, uint32_t> numbers_;
  std::vector<uint32_t> sequence_;  // operators as they were called
  std::vector<std::shared_ptr<PinRecord>> pins_;
  /// Slots, pins and backwards so far, which a recompute has to come to again.
  std::atomic<int64_t> num_inside_{0};
  int64_t num_kept_ = 0;
  // While the forward runs:
  ValueSources sources_;                   // settle_provenance asks
  std::vector<ResultIndex> kept_results_;  // by the number that a storage's notes have
  std::vector<std::optional<ValueSources::Made>> slot_sources_;  // by position
  std::vector<ResultIndex> holding_;  // calls with results held for names
};

}  // namespace remat
