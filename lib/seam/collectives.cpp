#include "lib/seam/collectives.h"

#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

namespace remat::seam {

namespace {

constinit CollectiveWatcher collective_watcher = nullptr;

void saw(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (collective_watcher != nullptr) collective_watcher(op, *stack);
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

}  // namespace

void watch_collectives(CollectiveWatcher watcher) { collective_watcher = watcher; }

TORCH_LIBRARY_IMPL(c10d, ADInplaceOrView, library) {
  for (const char* name :
       {"broadcast_", "allreduce_", "allreduce_coalesced_", "reduce_", "allgather_",
        "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
        "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "gather_",
        "scatter_", "alltoall_", "alltoall_base_", "recv_", "recv_any_source_"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&saw>());
}

}  // namespace remat::seam
