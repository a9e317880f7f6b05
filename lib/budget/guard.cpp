// Bodies of budget.h.

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <utility>

#include "lib/base/error.h"
#include "lib/budget/budget_scope.h"
#include "lib/budget/calls.h"
#include "lib/budget/runtime.h"
#include "lib/scope/region_scope.h"
#include "lib/seam/dispatch_mode.h"
#include "remat/budget.h"
#include "remat/memory.h"

namespace remat {

namespace {

const BudgetOptions& checked(const BudgetOptions& options) {
  TORCH_CHECK_VALUE(options.bytes > 0, "remat::BudgetGuard: bytes was ", options.bytes,
                    ". Do: ask for a number of bytes above 0; INT64_MAX for a report without a limit.");
  TORCH_CHECK_VALUE(options.min_bytes >= -1, "remat::BudgetGuard: min_bytes was ", options.min_bytes,
                    ". Do: give 0 or more, or -1 for a thousandth of the budget.");
  if (!options.device.is_cpu())
    throw_unsupported("a budget was asked for on " + options.device.str(),
                      "only the CPU's allocator makes room inside an allocation",
                      "use regions or remat::fit on other devices");
  if (detail::innermost_region() != nullptr)
    throw_unsupported("a budget was opened inside a region",
                      "what a region saves is the region's, which recomputes it",
                      "open the BudgetGuard around the region");
  return options;
}

}  // namespace

struct BudgetGuard::Scope : detail::ScopeGuard {
  explicit Scope(const std::shared_ptr<budget::Runtime>& runtime)
      : ScopeGuard(std::make_shared<budget::BudgetScope>(runtime)), runtime(*runtime) {}
  ~Scope() {
    budget::settle_versions();
    budget::Dead dead;
    const std::lock_guard<std::mutex> lock(budget::Graph::get().mutex());
    budget::Graph::get().settle(runtime, dead);
  }
  const budget::Runtime& runtime;
  const seam::DispatchMode mode;
};

BudgetGuard::BudgetGuard(BudgetOptions options) {
  checked(options);
  budget::watch_allocations();
  runtime_ = std::make_shared<budget::Runtime>(options, MemoryMeter().live_bytes());
  scope_ = std::make_unique<Scope>(runtime_);
}

BudgetGuard::~BudgetGuard() = default;

BudgetReport BudgetGuard::report() const { return counters().now(); }

void BudgetGuard::reset() { counters().reset(); }

BudgetCounters BudgetGuard::counters() const { return BudgetCounters(runtime_->report()); }

BudgetReport BudgetCounters::now() const {
  const std::lock_guard<std::mutex> lock(budget::Graph::get().mutex());
  return *report_;
}

void BudgetCounters::reset() {
  const std::lock_guard<std::mutex> lock(budget::Graph::get().mutex());
  BudgetReport anew;
  anew.budget_bytes = report_->budget_bytes;
  anew.source_bytes = report_->source_bytes;
  *report_ = anew;
}

BudgetExceeded::BudgetExceeded(c10::SourceLocation where, std::string text, int64_t needed_bytes,
                               int64_t floor_bytes)
    : OutOfMemoryError(where, std::move(text)),
      needed_bytes_(needed_bytes),
      floor_bytes_(floor_bytes) {}

std::string BudgetReport::to_string() const {
  const auto mb = [](int64_t bytes) { return fmt::format("{:.2f} MB", static_cast<double>(bytes) / 1e6); };
  std::string text = fmt::format(
      "budget        {}\npeak          {}\nfloor         {}   (below this no budget can hold)\nsources       {}   (kept "
      "because a call may run again)\n",
      budget_bytes == INT64_MAX ? std::string("none") : mb(budget_bytes), mb(peak_bytes), mb(floor_bytes),
      mb(source_bytes));
  if (over_count > 0)
    text += fmt::format("over          {} at the most, in {} allocations\n", mb(over_bytes), over_count);
  text += fmt::format("operators     {} recorded, {} run again in {:.3f} s\nevictions     {}, chosen in {:.3f} s\n",
                      operators, reruns, rerun_s, evictions, search_s);
  return text;
}

}  // namespace remat
