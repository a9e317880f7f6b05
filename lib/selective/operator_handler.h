#pragma once
// The handler of a region's operators while its function runs: it keeps results, or returns kept
// ones.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>

#include "lib/scope/region_scope.h"
#include "lib/selective/call_record.h"

namespace remat {

/// The handler of one run of a region: its Selection in forward, its Replay in a recompute.
class OperatorHandler {
 public:
  /// Runs an operator about which this handler's region, the innermost one, decides.
  /// `is_outermost`: the region has no enclosing region.
  virtual void run(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                   const detail::RegionScope& region, bool is_outermost) = 0;
  /// Called before and after an operator about which an inner region decides. `before_inner`
  /// returns the number of the call for `after_inner`.
  virtual int64_t before_inner(const c10::OperatorHandle& op,
                               c10::ArrayRef<c10::IValue> arguments) = 0;
  virtual void after_inner(const c10::OperatorHandle& op, int64_t call,
                           c10::ArrayRef<c10::IValue> results, const StoragesOf& given) = 0;
  /// Records the current exception as the run's error, which counts even if the function catches
  /// it.
  virtual void note_mismatch() {}

 protected:
  ~OperatorHandler() = default;  // owned through another base
};

}  // namespace remat
