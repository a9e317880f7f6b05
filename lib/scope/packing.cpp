#include "lib/scope/packing.h"

#include "lib/scope/region_scope.h"

namespace remat {

namespace {
thread_local int num_packing = 0;
}  // namespace

Packing::Packing(const at::Tensor& saved) {
  ++num_packing;
  detail::visit_regions([&](detail::RegionScope& scope) {
    if (detail::ReadWatcher* const watcher = scope.reads()) watcher->tensor_was_read(saved);
  });
}

Packing::~Packing() { --num_packing; }

bool Packing::is_under_way() { return num_packing > 0; }

}  // namespace remat
