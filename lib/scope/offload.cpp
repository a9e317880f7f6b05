#include "lib/scope/offload.h"

#include <atomic>
#include <functional>
#include <utility>

#include "hooks/elsewhere.h"
#include "hooks/save_as.h"
#include "hooks/save_on_cpu.h"
#include "hooks/save_on_disk.h"
#include "lib/scope/hook_stack.h"
#include "lib/scope/saving_input.h"
#include "remat/hooks.h"

namespace remat {

namespace detail {

namespace {

class ElsewhereScope final : public Scope {
 public:
  explicit ElsewhereScope(std::shared_ptr<Depot> depot) : depot_(std::move(depot)) {
    answers(Ability::Hooks);
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    auto depot = depot_.load();
    return depot ? std::make_unique<Elsewhere>(std::move(depot), input_being_saved()) : nullptr;
  }

 private:
  // The spool and what is shared go when the guard does, even if a stale stack still holds this
  // scope.
  void on_close() override {
    if (const auto depot = depot_.exchange(nullptr)) depot->settle();
  }
  std::atomic<std::shared_ptr<Depot>> depot_;
};

std::shared_ptr<ElsewhereScope> scope_with(std::unique_ptr<Place> place, DepotOptions options) {
  return std::make_shared<ElsewhereScope>(std::make_shared<Depot>(std::move(place), options));
}

bool at_end_of_backward(std::function<void()> closure) {
  if (seam::graph_task_id() < 0) return false;
  seam::at_end_of_graph_task(std::move(closure));
  return true;
}

}  // namespace

}  // namespace detail

// Never destroyed: at the end of the process the accelerator may be gone already.
const std::shared_ptr<Depot>& depot_of_inputs() {
  static const auto* const depot = new std::shared_ptr<Depot>(std::make_shared<Depot>(
      std::make_unique<SaveOnCpu>(/*pin_memory=*/true, detail::at_end_of_backward),
      DepotOptions{.raises_if_changed = true}));
  return *depot;
}

SaveOnCpuGuard::SaveOnCpuGuard(SaveOnCpuOptions options)
    : ScopeGuard(detail::scope_with(
          std::make_unique<SaveOnCpu>(options.pin_memory, detail::at_end_of_backward),
          {.min_bytes = options.min_bytes, .skip_parameters = options.skip_parameters})) {}

SaveOnDiskGuard::SaveOnDiskGuard(SaveOnDiskOptions options)
    : ScopeGuard(detail::scope_with(std::make_unique<SaveOnDisk>(std::move(options.directory)),
                                    {.min_bytes = options.min_bytes})) {}

SaveAsGuard::SaveAsGuard(at::ScalarType dtype, int64_t min_bytes)
    : ScopeGuard(detail::scope_with(std::make_unique<SaveAs>(dtype), {.min_bytes = min_bytes})) {}

}  // namespace remat
