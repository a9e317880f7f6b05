#include "lib/frame/running_statistics.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "lib/base/once_per_name.h"
#include "lib/scope/region_scope.h"
#include "lib/seam/warn.h"
#include "lib/state/buffer.h"
#include "lib/state/module_state.h"

namespace remat {

namespace {

bool may_be_restored(const UserState* state, const c10::StorageImpl* buffer) {
  if (state == nullptr) return false;
  const auto& providers = state->registered().providers;
  return std::any_of(providers.begin(), providers.end(), [&](const auto& provider) {
    return buffer == nullptr || may_restore(*provider, buffer);
  });
}

}  // namespace

void saw_running_statistics(const Region& region, Inputs& inputs, const Surroundings& surroundings,
                            std::vector<const c10::StorageImpl*> statistics) {
  for (const c10::StorageImpl* each : statistics)
    if (each != nullptr) note_norm(*each);
  bool runs_again = true;
  detail::visit_regions([&](detail::RegionScope& around) {
    runs_again = runs_again && !around.is_save_region;
    for (const c10::StorageImpl* each : statistics)
      if (runs_again && each != nullptr) around.statistics_moved(each);
  });
  std::erase_if(statistics,
                [&](const c10::StorageImpl* each) { return inputs.note_statistics(region, each); });
  const UserState* const state = surroundings.user_state();
  if (region.options.ignores_buffers ||
      std::all_of(statistics.begin(), statistics.end(),
                  [&](const auto* buffer) { return may_be_restored(state, buffer); }))
    return;
  static OncePerName warned;
  const std::string& name = region.info.name();
  if (!warned.is_first(name)) return;
  seam::warn(c10::str(
      "remat::checkpoint: ", statistics.front() == nullptr ? "an instance" : "a batch",
      " norm in training mode ran in ",
      name.empty() ? "a region without a name" : "region \"" + name + "\"",
      ", whose recompute will update its running statistics once more. Cause: the module is not "
      "the region's function, so the region does not know its buffers. Hint: pass the module as "
      "the function, or name it in CheckpointOptions::modules; a script module must be the "
      "function itself. If a second update is right, set BufferPolicy::Ignore."));
}

}  // namespace remat
