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
#include "lib/selective/kept_tensor.h"
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
    bool had_hooks = false;  ///< when it was kept; for results of save_region
  };
  const std::type_info* type = nullptr;
  std::shared_ptr<void> emptied;
  std::vector<Value> values;
  DrawSkips draws;
  std::vector<std::any> states;  ///< states of the region's providers after save_region's function
  bool is_name = false;  ///< a pin of checkpoint_name: the recompute's own value may replace it
};

/// The record, written by the region's Selection while the forward runs, and read by the Replay of
/// each recompute.
struct KeptRecord {
  mutable SpinLock mutex;  ///< guards the members below until the forward is over
  std::atomic<bool> is_settled{false};
  Slab<CallRecord> slab;  ///< outlives the members below
  std::vector<OpRecord> operators;
  ska::flat_hash_map<c10::OperatorHandle, uint32_t> numbers;
  std::vector<uint32_t> sequence;                ///< numbers of operators, as they were called
  std::vector<std::shared_ptr<PinRecord>> pins;  ///< null: keeps no values
  int64_t num_kept = 0;                          ///< calls

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
    const auto found = numbers.find(op);
    return found == numbers.end() ? -1 : static_cast<int64_t>(found->second);
  }
};

}  // namespace remat
