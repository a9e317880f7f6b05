// The guards that move saved tensors, and the depots of what regions keep.

#include "lib/move/depots.h"

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "hooks/depot/elsewhere.h"
#include "hooks/depot/move_totals.h"
#include "hooks/depot/staying.h"
#include "hooks/disk/save_in_tiers.h"
#include "hooks/disk/save_on_disk.h"
#include "hooks/host/save_as.h"
#include "hooks/host/save_on_cpu.h"
#include "lib/frame/layers.h"
#include "lib/scope/hook_stack.h"
#include "lib/scope/saving_input.h"
#include "remat/hooks.h"
#include "remat/options.h"
#include "remat/place.h"
#include "remat/tiers.h"

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
  // The spool and shared copies are released with the guard, even if a stale stack still holds this
  // scope.
  void on_close() override {
    if (const auto depot = depot_.exchange(nullptr)) depot->settle();
  }
  std::atomic<std::shared_ptr<Depot>> depot_;
};

bool at_end_of_backward(std::function<void()> closure) {
  if (seam::graph_task_id() < 0) return false;
  seam::at_end_of_graph_task(std::move(closure));
  return true;
}

/// Hides our hooks from tensors that a place saves, and keeps autocast off in both passes.
void without_scopes(c10::function_ref<void()> use_place) {
  const NoScopes no_scopes;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  use_place();
}

std::shared_ptr<Depot> depot_with(std::shared_ptr<Place> place, DepotOptions options) {
  return std::make_shared<Depot>(
      std::move(place), options,
      DepotSurroundings{.around = without_scopes, .at_end = at_end_of_backward});
}

std::shared_ptr<ElsewhereScope> scope_with(std::unique_ptr<Place> place, DepotOptions options) {
  return std::make_shared<ElsewhereScope>(depot_with(std::move(place), options));
}

int64_t not_negative(const char* guard, const char* name, int64_t value) {
  TORCH_CHECK_VALUE(value >= 0, "remat::", guard, ": ", name, " is ", value,
                    ".\nHint: give 0 or more.");
  return value;
}

/// Returns the rule for the last saved tensors, which stay on the device; null if none do.
std::shared_ptr<Staying> staying_last(int64_t keep_last) {
  static const auto nothing = std::make_shared<const std::atomic<int64_t>>(0);
  return keep_last == 0 ? nullptr : std::make_shared<Staying>(0, 0, nothing, keep_last);
}

/// Returns those options of a guard that its depot follows. `Options` may lack some of them.
template <class Options>
DepotOptions depot_options(const char* guard, const Options& options) {
  DepotOptions depot{.min_bytes = not_negative(guard, "min_bytes", options.min_bytes)};
  if constexpr (requires { options.skip_parameters; })
    depot.skip_parameters = options.skip_parameters;
  if constexpr (requires { options.prefetch_depth; })
    depot.prefetch_depth = not_negative(guard, "prefetch_depth", options.prefetch_depth);
  if constexpr (requires { options.max_bytes_in_flight; })
    depot.max_bytes_in_flight =
        not_negative(guard, "max_bytes_in_flight", options.max_bytes_in_flight);
  if constexpr (requires { options.keep_last; })
    depot.staying = staying_last(not_negative(guard, "keep_last", options.keep_last));
  return depot;
}

std::shared_ptr<ElsewhereScope> scope_of_user(std::unique_ptr<Place> place,
                                              const SaveElsewhereOptions& options) {
  TORCH_CHECK_VALUE(place != nullptr,
                    "remat::SaveElsewhereGuard: the place is null.\n"
                    "Hint: pass a place, such as std::make_unique<YourPlace>().");
  return scope_with(std::move(place), depot_options("SaveElsewhereGuard", options));
}

std::shared_ptr<ElsewhereScope> scope_of(const SaveOnCpuOptions& options,
                                         std::shared_ptr<MoveTotals> totals) {
  DepotOptions depot = depot_options("SaveOnCpuGuard", options);
  // Only asynchronous copies gain from being started early.
  if (!options.pin_memory) depot.prefetch_depth = 0;
  depot.max_bytes_in_flight = DepotOptions().max_bytes_in_flight;  // the place's own
  depot.totals = std::move(totals);
  return scope_with(std::make_unique<SaveOnCpu>(options.pin_memory, options.max_bytes_in_flight),
                    std::move(depot));
}

std::shared_ptr<ElsewhereScope> scope_of(SaveOnDiskOptions options,
                                         std::shared_ptr<MoveTotals> totals) {
  DepotOptions depot = depot_options("SaveOnDiskGuard", options);
  depot.totals = std::move(totals);
  return scope_with(std::make_unique<SaveOnDisk>(std::move(options.directory)), std::move(depot));
}

std::shared_ptr<ElsewhereScope> scope_of(const SaveInTiersOptions& options,
                                         const std::shared_ptr<TierTotals>& totals) {
  not_negative("SaveInTiersGuard", "device_bytes", options.device_bytes);
  not_negative("SaveInTiersGuard", "host_bytes", options.host_bytes);
  DepotOptions depot = depot_options("SaveInTiersGuard", options);
  TORCH_CHECK_VALUE(
      !options.directory.empty() || options.host_bytes == SaveInTiersOptions().host_bytes,
      "remat::SaveInTiersGuard: host_bytes is ", options.host_bytes,
      ", and there is no directory for tensors beyond that.\n"
      "Hint: set a directory, or leave host_bytes out.");
  const std::shared_ptr<const std::atomic<int64_t>> on_host(totals, &totals->on_host);
  depot.prefetch_depth = 1;
  depot.staying = std::make_shared<Staying>(options.host_bytes, options.device_bytes, on_host,
                                            options.keep_last);
  return scope_with(std::make_unique<SaveInTiers>(options, totals), std::move(depot));
}

/// The process has one depot for what `CheckpointOptions::offload_inputs` moves to the CPU with
/// this depth (none: the default). A changed input raises when it is read, as if it had stayed.
// Never destroyed: at the end of the process the accelerator may be gone already.
const std::shared_ptr<Depot>& depot_of_inputs(std::optional<int64_t> prefetch_depth) {
  // All depots share a place, and its bound on bytes in flight.
  static const auto* const place = new std::shared_ptr<Place>(std::make_shared<SaveOnCpu>(
      /*pin_memory=*/true, SelectiveOptions().max_bytes_in_flight));
  const auto make = [](int64_t depth) {
    return depot_with(*place, {.raises_if_changed = true, .prefetch_depth = depth});
  };
  if (!prefetch_depth) {
    static const auto* const depot =
        new std::shared_ptr<Depot>(make(CheckpointOptions().offload_prefetch_depth));
    return *depot;
  }
  static std::mutex mutex;
  static auto* const all = new std::map<int64_t, std::shared_ptr<Depot>>;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& depot = (*all)[*prefetch_depth];
  if (depot == nullptr) depot = make(*prefetch_depth);
  return depot;
}

std::unique_ptr<torch::autograd::SavedVariableHooks> offload_input(
    const at::Tensor& input, std::optional<int64_t> prefetch_depth) {
  const auto& depot = depot_of_inputs(prefetch_depth);
  return depot->moves(input) ? std::make_unique<Elsewhere>(depot, &input) : nullptr;
}

[[maybe_unused]] const bool offloads_inputs = (layers.offload_input = offload_input, true);

}  // namespace

}  // namespace detail

// Never destroyed: at the end of the process the accelerator may be gone already.
const std::shared_ptr<Depot>& depot_of_kept(int64_t prefetch_depth, int64_t max_bytes_in_flight,
                                            int64_t keep_last) {
  static std::mutex mutex;
  static auto* const all = new std::map<std::array<int64_t, 3>, std::shared_ptr<Depot>>;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& depot = (*all)[{prefetch_depth, max_bytes_in_flight, keep_last}];
  if (depot == nullptr)
    depot = detail::depot_with(
        std::make_unique<SaveOnCpu>(/*pin_memory=*/true, max_bytes_in_flight),
        {.prefetch_depth = prefetch_depth, .staying = detail::staying_last(keep_last)});
  return depot;
}

std::shared_ptr<Depot> depot_of_moves(std::shared_ptr<Place> place, int64_t min_bytes,
                                      std::string name) {
  // All tensors of a plan's item are copied at once; the work that runs meanwhile hides the copies.
  constexpr int64_t unbounded = std::numeric_limits<int64_t>::max() / 2;
  static const auto nothing = std::make_shared<const std::atomic<int64_t>>(0);
  std::shared_ptr<MoveTotals> totals;
  if (!name.empty()) totals.reset(new MoveTotals{.name = std::move(name)});
  return detail::depot_with(std::move(place),
                            {.min_bytes = min_bytes,
                             .prefetch_depth = 1,
                             .max_bytes_in_flight = unbounded,
                             .staying = std::make_shared<Staying>(0, 0, nothing, /*keep_last=*/0),
                             .totals = std::move(totals)});
}

DepotGuard::DepotGuard(std::shared_ptr<Depot> depot)
    : ScopeGuard(std::make_shared<detail::ElsewhereScope>(std::move(depot))) {}

SaveOnCpuGuard::SaveOnCpuGuard(SaveOnCpuOptions options)
    : SaveOnCpuGuard(options, std::make_shared<MoveTotals>()) {}

SaveOnCpuGuard::SaveOnCpuGuard(const SaveOnCpuOptions& options, std::shared_ptr<MoveTotals> totals)
    : ScopeGuard(detail::scope_of(options, totals)), totals_(std::move(totals)) {}

SaveOnDiskGuard::SaveOnDiskGuard(SaveOnDiskOptions options)
    : SaveOnDiskGuard(std::move(options), std::make_shared<MoveTotals>()) {}

SaveOnDiskGuard::SaveOnDiskGuard(SaveOnDiskOptions options, std::shared_ptr<MoveTotals> totals)
    : ScopeGuard(detail::scope_of(std::move(options), totals)), totals_(std::move(totals)) {}

MoveCounts MoveCounters::now() const {
  return {.moves = totals_->num_moves,
          .bytes_moved = totals_->bytes_moved,
          .loads = totals_->num_loads,
          .loads_ahead = totals_->num_loads_ahead,
          .bytes_loaded = totals_->bytes_loaded,
          .seconds_waited = 1e-9 * static_cast<double>(totals_->spent_ns)};
}

SaveAsGuard::SaveAsGuard(at::ScalarType dtype, int64_t min_bytes)
    : ScopeGuard(detail::scope_with(std::make_unique<SaveAs>(dtype), {.min_bytes = min_bytes})) {}

SaveInTiersGuard::SaveInTiersGuard(const SaveInTiersOptions& options)
    : SaveInTiersGuard(options, std::make_shared<TierTotals>()) {}

SaveInTiersGuard::SaveInTiersGuard(const SaveInTiersOptions& options,
                                   std::shared_ptr<TierTotals> totals)
    : ScopeGuard(detail::scope_of(options, totals)), totals_(std::move(totals)) {}

TierCounts TierCounters::now() const {
  return {.bytes_on_host = totals_->on_host,
          .bytes_on_disk = totals_->on_disk,
          .bytes_to_host = totals_->to_host,
          .bytes_to_disk = totals_->to_disk,
          .bytes_loaded = totals_->loaded,
          .loads = totals_->num_loads,
          .waits = totals_->num_waits,
          .seconds_waited = 1e-9 * static_cast<double>(totals_->waited_ns),
          .failed_writes = totals_->num_failed_writes};
}

SaveElsewhereGuard::SaveElsewhereGuard(std::unique_ptr<Place> place, SaveElsewhereOptions options)
    : ScopeGuard(detail::scope_of_user(std::move(place), options)) {}

}  // namespace remat
