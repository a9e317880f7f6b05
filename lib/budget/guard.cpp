// Bodies of budget.h.

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "lib/base/error.h"
#include "lib/budget/budget_scope.h"
#include "lib/budget/rerun.h"
#include "lib/budget/room.h"
#include "lib/budget/runtime.h"
#include "lib/budget/versions.h"
#include "lib/observe/counted_memory.h"
#include "lib/observe/recording.h"
#include "lib/scope/region_scope.h"
#include "lib/seam/accelerator.h"
#include "lib/seam/dispatch_mode.h"
#include "remat/budget.h"
#include "remat/memory.h"

namespace remat {

namespace {

BudgetOptions checked(BudgetOptions options) {
  TORCH_CHECK_VALUE(
      options.bytes > 0, "remat::BudgetGuard: bytes was ", options.bytes,
      ". Hint: set a number of bytes above 0, or INT64_MAX for a report without a limit.");
  TORCH_CHECK_VALUE(options.min_bytes >= -1, "remat::BudgetGuard: min_bytes was ",
                    options.min_bytes,
                    ". Hint: give 0 or more, or -1 for a thousandth of the budget.");
  if (!options.device.is_cpu() && options.device.type() != present_accelerator())
    throw_unsupported("a budget was requested on " + options.device.str(),
                      "this process has no such accelerator",
                      "set the CPU, or an accelerator that LibTorch can use");
  options.device = with_index(options.device);
  if (!options.device.is_cpu() && options.check_values)
    throw_unsupported("check_values was set for a budget of " + options.device.str(),
                      "each dropped value is hashed when it is dropped, and on an accelerator "
                      "the program would have to wait for that",
                      "leave check_values off, or check the program on the CPU");
  if (detail::innermost_region() != nullptr)
    throw_unsupported("a budget was opened inside a region",
                      "a region recomputes its saved tensors itself, so a budget cannot drop them",
                      "open the BudgetGuard around the region");
  return options;
}

std::atomic<BudgetRaise> raise_of_binding{nullptr};

/// Returns whether this thread belongs to the budget: it is in the scope, or reruns its operators.
bool is_on_its_thread(const budget::Runtime& runtime) {
  const auto* const scope = budget::BudgetScope::innermost();
  return (scope != nullptr && &scope->runtime() == &runtime) ||
         budget::rerun_on_this_thread() == &runtime;
}

void allocation_begins(int64_t bytes, int64_t live) {
  budget::announce(c10::kCPU, bytes, live, /*in_allocator=*/true);
}

bool data_freed(const void* storage, const void* data) noexcept {
  return budget::Graph::get().data_freed(storage, data);
}

// A forked process (a loader's worker) gets a consistent graph: no other thread changes it during
// the fork.
void lock_at_fork() { budget::Graph::get().mutex().lock(); }
void unlock_after_fork() { budget::Graph::get().mutex().unlock(); }
void unlock_in_child() {
  budget::Graph::get().mutex().unlock();
  budget::end_reruns_of_others();
}

void watch_allocations() {
  static constexpr AllocationCallbacks callbacks{allocation_begins, data_freed};
  static const bool is_set = [] {
    set_allocation_callbacks(callbacks);
    return pthread_atfork(lock_at_fork, unlock_after_fork, unlock_in_child) == 0;
  }();
  (void)is_set;
}

}  // namespace

void budget::announce(c10::Device device, int64_t bytes, int64_t live_bytes, bool in_allocator) {
  std::vector<recording::Eviction> told;
  int64_t needed = 0, floor = 0, freed = 0;
  const Runtime::Wanted wanted{device, bytes, in_allocator, is_recording() ? &told : nullptr};
  for (std::shared_ptr<Moved> copy;;) {
    if (copy != nullptr) {  // other threads allocate and free meanwhile
      std::exchange(copy, nullptr)->wait();
      live_bytes = (device.is_cpu() ? cpu_memory() : device_memory(device)).live_bytes();
      freed = 0;
    }
    Dead dead;  // freed before the allocation, after the lock
    const std::lock_guard<std::mutex> lock(Graph::get().mutex());
    visit_runtimes([&](Runtime& each) {
      freed += each.make_room(wanted, live_bytes - freed, dead, copy);
      if (copy != nullptr) return;
      const Bound* const bound = each.bounds().refusing(device, live_bytes - freed + bytes);
      if (bound == nullptr || !is_on_its_thread(each)) return;
      needed = live_bytes - freed + bytes - bound->base_bytes;
      floor = bound->report.floor_bytes;
    });
    if (copy == nullptr) break;
    needed = 0;
  }
  if (!told.empty()) recording::budget_drops(told);
  if (needed == 0) return;
  const BudgetExceeded error(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
      fmt::format(
          "remat::BudgetGuard: an allocation of {} bytes did not fit into the budget, and "
          "nothing more could be dropped.\n"
          "Cause: the tensors that the program holds, with the ones that the operator reads and "
          "writes, exceed the budget.\n"
          "Hint: set {} bytes or more, or let OverBudget::Continue exceed the budget.",
          bytes, needed),
      needed, floor);
  raise_in_binding(error);
  throw error;
}

void announce_allocation(c10::Device device, int64_t bytes) {
  const MemorySource* memory = nullptr;
  if (!device.is_cpu()) {
    const std::lock_guard<std::mutex> lock(budget::Graph::get().mutex());
    budget::visit_runtimes([&](const budget::Runtime& each) {
      for (const budget::Bound* const bound : each.bounds().far())
        if (bound->is_of(device)) memory = &bound->memory;
    });
  }
  if (bytes > 0 && memory != nullptr)
    budget::announce(device, bytes, memory->live_bytes(), /*in_allocator=*/true);
}

void budget::raise_in_binding(const c10::Error& error) {
  if (const BudgetRaise raise = raise_of_binding.load(std::memory_order_acquire)) raise(error);
}

void set_budget_raise(BudgetRaise raise) {
  raise_of_binding.store(raise, std::memory_order_release);
}

struct BudgetGuard::Scope : detail::ScopeGuard {
  explicit Scope(const std::shared_ptr<budget::Runtime>& runtime)
      : ScopeGuard(std::make_shared<budget::BudgetScope>(runtime)), runtime(runtime) {}
  ~Scope() {
    budget::settle_versions();
    budget::Dead dead;
    const std::lock_guard<std::mutex> lock(budget::Graph::get().mutex());
    if (!runtime->has_saved()) budget::Graph::get().cut(*runtime, dead);
  }
  const std::shared_ptr<budget::Runtime> runtime;
  const seam::DispatchMode mode;
};

BudgetGuard::BudgetGuard(BudgetOptions options) {
  options = checked(std::move(options));
  watch_allocations();
  bound_ = std::make_shared<budget::Bound>(options);
  if (options.moving.has_value())
    bound_->mover = std::make_shared<budget::Mover>(*options.moving, options.device);
  if (const auto* const around = budget::BudgetScope::innermost()) {
    runtime_ = around->runtime().shared_from_this();
    runtime_->add(bound_);
    is_inside_ = true;
  } else {
    runtime_ = std::make_shared<budget::Runtime>(bound_);
  }
  scope_ = std::make_unique<Scope>(runtime_);
}

BudgetGuard::~BudgetGuard() {
  if (is_inside_) {
    runtime_->remove(*bound_);
    bound_->mover.reset();
    return;
  }
  scope_.reset();
  budget::Dead dead;
  const std::lock_guard<std::mutex> lock(budget::Graph::get().mutex());
  runtime_->close(dead);
}

BudgetReport BudgetGuard::report() const { return counters().now(); }

void BudgetGuard::reset() { counters().reset(); }

BudgetCounters BudgetGuard::counters() const { return BudgetCounters(bound_); }

BudgetReport BudgetCounters::now() const {
  const std::lock_guard<std::mutex> lock(budget::Graph::get().mutex());
  return bound_->report;
}

void BudgetCounters::reset() {
  const std::lock_guard<std::mutex> lock(budget::Graph::get().mutex());
  BudgetReport anew;
  anew.budget_bytes = bound_->report.budget_bytes;
  anew.source_bytes = bound_->report.source_bytes;
  bound_->report = anew;
}

BudgetExceeded::BudgetExceeded(c10::SourceLocation where, std::string text, int64_t needed_bytes,
                               int64_t floor_bytes)
    : OutOfMemoryError(where, std::move(text)),
      needed_bytes_(needed_bytes),
      floor_bytes_(floor_bytes) {}

std::string BudgetReport::to_string() const {
  const auto mb = [](int64_t bytes) {
    return fmt::format("{:.2f} MB", static_cast<double>(bytes) / 1e6);
  };
  std::string text = fmt::format(
      "budget        {}\n"
      "peak          {}\n"
      "floor         {}   (below this no budget can hold)\n"
      "sources       {}   (kept because a call may run again)\n",
      budget_bytes == INT64_MAX ? std::string("none") : mb(budget_bytes), mb(peak_bytes),
      mb(floor_bytes), mb(source_bytes));
  if (over_count > 0)
    text += fmt::format("over          {} at the most, in {} allocations\n", mb(over_bytes),
                        over_count);
  text += fmt::format(
      "operators     {} recorded, {} run again in {:.3f} s\nevictions     {}, chosen in {:.3f} s\n",
      operators, reruns, rerun_s, evictions, search_s);
  if (moves > 0) text += fmt::format("moves         {}, instead of evictions\n", moves);
  return text;
}

}  // namespace remat
