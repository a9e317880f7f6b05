#pragma once
// The record that a region keeps of its forward: the calls of its operators in order, and the pins.

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/flat_hash_map.h>

#include <any>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <typeinfo>
#include <vector>

#include "lib/base/slab.h"
#include "lib/base/spin_lock.h"
#include "lib/selective/call_record.h"
#include "lib/selective/in_argument.h"
#include "lib/selective/kept_tensor.h"
#include "lib/selective/policy_rule.h"
#include "lib/selective/value_sources.h"
#include "lib/state/surroundings.h"
#include "lib/tensor/graph_walk.h"

namespace remat {

/// A pin: the values kept by one call of pin() or save_region(), or of checkpoint_name() if the
/// value itself is kept.
struct PinRecord {
  struct Value {
    KeptTensor tensor;
    GradRole role;
    std::optional<ValueSources::Made> made{};
    bool had_hooks = false;                ///< when it was kept; for results of save_region
    std::optional<InArgument> argument{};  ///< set if it lies in an argument of save_region
  };
  const std::type_info* type = nullptr;
  std::shared_ptr<void> emptied;
  std::vector<Value> values;
  DrawSkips draws;
  std::vector<std::any> states;  ///< states of the region's providers after save_region's function
  bool is_name = false;    ///< a pin of checkpoint_name: the recompute's own value may replace it
  bool is_region = false;  ///< a pin of save_region
  /// A save_region whose results were not kept, or were released: the function runs again. If it
  /// `is_plain`, it runs as a part of the region.
  bool is_let_go = false, is_plain = false;
  std::vector<InArgument> saved_arguments;  ///< of save_region, in the order of their slots
};

/// The place of a kept result: the numbers of its operator, of the call, of the call's result, and
/// of the tensor in that. The place of a call has the first two.
struct KeptIndex {
  uint32_t op, call, result = 0, tensor = 0;
};

/// Objects that are released under the record's lock and freed after it: declare it before the
/// lock.
struct Freed {
  std::vector<c10::SmallVector<KeptResult, 1>> results;
  std::vector<at::Tensor> held;
  std::vector<CallRecordPtr> records;
  std::vector<std::vector<PinRecord::Value>> values;
};

/// The calls of a region's forward, and their kept results. The region's Selection writes the
/// record while the forward runs; the Replay of each recompute reads it. Call its functions under
/// its lock.
class KeptRecord {
 public:
  /// Makes a record. `rule` may be null: then only pins are kept.
  explicit KeptRecord(std::shared_ptr<const PolicyRule> rule);

  /// Returns a lock of the record; empty once the forward is over.
  std::unique_lock<SpinLock> lock() const {
    return is_settled ? std::unique_lock<SpinLock>() : std::unique_lock<SpinLock>(mutex);
  }
  template <class Visitor>
  void visit_pinned(Visitor&& visitor) const {
    for (const auto& pin : pins)
      if (pin != nullptr)
        for (const PinRecord::Value& each : pin->values) visitor(each.tensor);
  }
  /// Visits the kept tensors of calls and pins.
  template <class Visitor>
  void visit_kept(Visitor&& visitor) const {
    for (const OpRecord& op : operators)
      for (const auto& call : op.calls)
        if (call != nullptr && call->is_kept)
          for (const KeptResult& result : call->kept)
            for (const KeptTensor& each : result.tensors) visitor(each);
    visit_pinned(visitor);
  }
  /// Returns the number of an operator; -1 if forward did not call it.
  int64_t number_of(const c10::OperatorHandle& op) const {
    const auto found = numbers_.find(op);
    return found == numbers_.end() ? -1 : static_cast<int64_t>(found->second);
  }
  /// Returns whether any result may be kept later, after other operators have read it.
  bool looks_at_names() const { return rule != nullptr && rule->looks_at_names(); }

  // Functions for forward:
  /// Adds a call, which has no record yet.
  KeptIndex add_call(const c10::OperatorHandle& op);
  CallRecordPtr make_record();
  CallRecordPtr& at(const KeptIndex& call) { return operators[call.op].calls[call.call]; }
  /// Counts a call whose record has kept results. Writes to them are noticed from now on.
  void add_kept(const KeptIndex& call, const CallRecord& record);
  /// Sets the sources of a call's results.
  void note_results(const KeptIndex& call, c10::ArrayRef<c10::IValue> results,
                    const StoragesOf& given);
  /// Records that an operator which a recompute runs reads a storage, arguments, those of a call.
  void note_read(const c10::StorageImpl* storage);
  void note_read(c10::ArrayRef<c10::IValue> arguments);
  void note_read(const CallRecord& call);
  /// Records the writes of an operator of another region.
  void note_written(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                    Freed& freed);
  /// Returns whether an operator writes to a kept result that stays kept as written.
  bool writes_to_kept(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                      Freed& freed);
  /// Returns the place of the kept result with this storage, or null.
  const KeptIndex* kept_result(const c10::StorageImpl* storage);
  /// Releases the results of a call: recomputes run it again.
  void let_go(const KeptIndex& call, Freed& freed);
  /// Records that a call should have been kept and is not.
  void note_let_go(const KeptIndex& call);
  /// Releases the results of the calls from number `first` in `sequence` on.
  void let_go_from(std::size_t first, Freed& freed);
  /// Releases the results of the calls of save_region from number `first` in `pins` on.
  void let_go_regions_from(std::size_t first, Freed& freed);
  /// Ends the forward. Releases what only forward needs, and adds stores that are unfinished.
  void end_forward(std::vector<KeptTensor::Unfinished>& unfinished, Freed& freed);

  const std::shared_ptr<const PolicyRule> rule;
  const int64_t task_at_start;
  mutable SpinLock mutex;  ///< guards the members below until the forward is over
  std::atomic<bool> is_settled{false};
  Slab<CallRecord> slab;  ///< outlives the members below
  std::vector<OpRecord> operators;
  std::vector<uint32_t> sequence;                ///< numbers of operators, as they were called
  std::vector<std::shared_ptr<PinRecord>> pins;  ///< null: keeps no values
  int64_t num_kept = 0;                          ///< calls
  ValueSources sources;                          ///< until the forward is over

 private:
  void note_written(const KeptIndex& call, Freed& freed);

  ska::flat_hash_map<c10::OperatorHandle, uint32_t> numbers_;
  std::vector<KeptIndex> kept_results_;  ///< by the number in a storage's notes
};

}  // namespace remat
