#pragma once
// The droppable values on one device, and the choice among them.
//
// Note [What is dropped first]
// The value with the least score is dropped first. The score is the time to make the value again,
// divided by its bytes and by the square root of its distance. The time includes the dropped values
// that the rerun needs. The distance is the work until backward reads the value, or a dropped value
// made of it. It is known, because backward reads in the reverse order of saving. Dynamic Tensor
// Rematerialization divides by the time since the last use instead, and adds the cost of dropped
// values made of the value: that recomputes 1.3 to 2.6 times more (measured). Exact scores are
// computed only for the sixteen values with the least scores by the latest costs. A pool of more
// than 1,024 values is walked once for many choices, among a list of its cheapest.

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lib/budget/value.h"

namespace remat::budget {

/// Computes the time of a rerun of the value, and the clock at which backward needs its result
/// first.
void look_closely(Value& value);

/// Guarded by the graph's lock.
class Pool {
 public:
  /// The place of a choice in the step.
  struct Now {
    double clock, cursor;  ///< [seconds] of the runtime
    int64_t min_bytes;     ///< smaller values are not dropped
  };

  explicit Pool(c10::Device device) : device_(device) {}
  c10::Device device() const { return device_; }
  const std::vector<Value*>& values() const { return values_; }
  /// [bytes] of values that the budget can drop, or could when they came.
  int64_t bytes() const { return bytes_; }

  void put(Value& value);
  void remove(Value& value);
  /// Adds the value to the bytes, unless it is there.
  void count(Value& value);
  /// Returns the value with the least score; null if no value can be dropped.
  Value* choose(const Now& now);
  /// Returns whether a sixteenth of the values is new since this returned true.
  bool has_grown();

 private:
  Value* cheapest_of(c10::ArrayRef<Value*> values, const Now& now);
  void make_shortlist(const Now& now);

  const c10::Device device_;
  std::vector<Value*> values_{};
  // The cheapest values of a large pool at the latest walk, with null for those that have left.
  std::vector<Value*> shortlist_{};
  std::size_t num_choices_left_ = 0;
  std::size_t num_added_ = 0;  // since `has_grown` returned true
  int64_t bytes_ = 0;
};

}  // namespace remat::budget
