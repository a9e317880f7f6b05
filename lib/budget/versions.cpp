#include "lib/budget/versions.h"

#include <c10/util/SmallVector.h>

#include <utility>

#include "lib/budget/graph.h"

namespace remat::budget {

namespace {
// The weak reference keeps the address from being reused by a storage of another thread.
thread_local c10::SmallVector<std::pair<c10::VariableVersion, WeakStorage>, 2> just_written;
}  // namespace

void note_written(const at::Tensor& tensor) {
  if (!tensor.is_inference())
    just_written.emplace_back(tensor.unsafeGetTensorImpl()->version_counter(),
                              weak_storage_of(tensor));
}

void settle_versions() {
  if (just_written.empty()) return;
  Graph& graph = Graph::get();
  {
    Dead dead;
    const std::lock_guard<std::mutex> lock(graph.mutex());
    for (const auto& [counter, storage] : just_written)
      if (Value* const value = graph.value_at(*storage._unsafe_get_target(), dead))
        value->version = counter.current_version();
  }
  just_written.clear();
}

}  // namespace remat::budget
