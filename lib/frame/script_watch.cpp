#include "lib/frame/script_watch.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

#include "lib/scope/region_scope.h"

namespace remat {

namespace {

/// The watch in whose region this thread saw a call that was not announced.
thread_local ScriptWatch* unannounced = nullptr;
/// The number of announced calls in progress on this thread.
thread_local int num_announced = 0;

struct Announced {
  ScriptWatch& watch;
  const int uncaught = std::uncaught_exceptions();
  const seam::ScriptsUnoptimized unoptimized{};
};

void* call_began() {
  detail::RegionScope* const region = detail::innermost_region();
  if (region == nullptr || !region->is_own_thread() || region->scripts() == nullptr) return nullptr;
  return region->scripts()->began();
}

}  // namespace

bool ScriptWatch::begin_observing() {
  static std::atomic<bool> observes{false};
  if (observes.load(std::memory_order_acquire) || observes.exchange(true)) return false;
  seam::observe_script_calls({call_began, ended});
  return true;
}

void ScriptWatch::take_unannounced() {
  if (unannounced == nullptr) return;
  seam::ScriptPlan plan = seam::last_script_plan();
  if (!plan.graphs.empty()) unannounced->plans_.push_back(std::move(plan));
}

void ScriptWatch::saw_save() {
  if (num_announced > 0) return;
  take_unannounced();
  seam::forget_last_script_plan();
  unannounced = this;
  saw_unannounced_ = true;
}

void* ScriptWatch::began() {
  take_unannounced();
  unannounced = nullptr;
  ++num_announced;
  return new Announced{*this};
}

void ScriptWatch::ended(void* begun) {
  const std::unique_ptr<Announced> call(static_cast<Announced*>(begun));
  --num_announced;
  if (std::uncaught_exceptions() > call->uncaught) return;
  call->watch.plans_.push_back(seam::last_script_plan());
}

void ScriptWatch::end_unannounced() {
  if (unannounced != this) return;
  take_unannounced();
  unannounced = nullptr;
}

bool ran_same_plans(const std::vector<seam::ScriptPlan>& forward,
                    const std::vector<seam::ScriptPlan>& recompute) {
  if (recompute.size() > forward.size()) return false;
  const auto is_known = [](const seam::ScriptPlan& plan) { return plan.is_known; };
  return std::equal(recompute.begin(), recompute.end(), forward.begin()) &&
         std::all_of(recompute.begin(), recompute.end(), is_known);
}

}  // namespace remat
