#pragma once
// The costs of operator calls, learned in their first calls and then fixed.

#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <vector>

#include "remat/budget_trial.h"

namespace remat::budget {

/// Costs of operators by shapes. The caller holds the graph's lock.
class CostTable {
 public:
  static CostTable& get();
  /// Returns the least time [seconds] of the first calls. Later calls do not change it, so that
  /// steps repeat.
  float cost(uint64_t call, float measured_s);
  /// Returns whether `cost` still learns from the call.
  bool is_learning(uint64_t call) const;
  /// Returns the bytes that the call took at most on its device; 0 if it is unknown.
  int64_t bytes(uint64_t call) const;
  void note_bytes(uint64_t call, int64_t bytes);
  std::vector<CallCost> all() const;
  void set_all(const std::vector<CallCost>& costs);
  uint32_t num_learned = 3;  ///< number of calls from which a cost is learned

 private:
  struct Entry;
  static ska::flat_hash_map<uint64_t, Entry>& entries();
};

}  // namespace remat::budget
