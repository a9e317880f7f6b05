#pragma once
// Who handles the operators of a region while its function runs: what keeps results, or gives them
// again.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>

#include "lib/scope/region_scope.h"
#include "lib/selective/call_record.h"

namespace remat {

/// One run of a region has one handler: its Selection in forward, its Replay in a recompute.
class OperatorHandler {
 public:
  /// Its region, the innermost one, decides about this operator. `is_outermost`: there is none
  /// around it.
  virtual void run(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                   const detail::RegionScope& region, bool is_outermost) = 0;
  /// A region inside decides about it; it runs between the two. Returns the number of the call, for
  /// `after_inner`.
  virtual int64_t before_inner(const c10::OperatorHandle& op,
                               c10::ArrayRef<c10::IValue> arguments) = 0;
  virtual void after_inner(const c10::OperatorHandle& op, int64_t call,
                           c10::ArrayRef<c10::IValue> results, const StoragesOf& given) = 0;
  /// The exception at hand says that the run cannot go on; it counts also if the function catches
  /// it.
  virtual void note_mismatch() {}

 protected:
  ~OperatorHandler() = default;  // owned as something else
};

}  // namespace remat
