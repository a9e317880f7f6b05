#include "lib/budget/runtime.h"

#include <c10/util/flat_hash_map.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <string_view>
#include <utility>

#include "lib/budget/cost_table.h"
#include "lib/budget/storages.h"
#include "lib/observe/counted_memory.h"

namespace remat::budget {

namespace {

std::vector<Runtime*>& runtimes() {
  static auto* const all = new std::vector<Runtime*>;  // leaked: tensors outlive static objects
  return *all;
}

int64_t sum_or_most(int64_t a, int64_t b) {
  return a > std::numeric_limits<int64_t>::max() - b ? std::numeric_limits<int64_t>::max() : a + b;
}

int64_t least_evicted(const BudgetOptions& options) {
  constexpr int64_t most = 64 << 10;
  return options.min_bytes >= 0 ? options.min_bytes : std::min(options.bytes / 1000, most);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

void visit_runtimes(c10::function_ref<void(Runtime&)> visitor) {
  for (Runtime* const each : runtimes()) visitor(*each);
}

Bound::Bound(const BudgetOptions& asked)
    : options(asked),
      memory(asked.device.is_cpu() ? cpu_memory() : device_memory(asked.device)),
      base_bytes(memory.live_bytes()),
      most_bytes(sum_or_most(asked.bytes, base_bytes)) {
  report.budget_bytes = asked.bytes;
}

Runtime::Runtime(std::shared_ptr<Bound> bound) {
  {
    const std::lock_guard<std::mutex> lock(Graph::get().mutex());
    runtimes().push_back(this);
    want_announcements(true);
  }
  add(std::move(bound));
}

Runtime::~Runtime() {
  c10::SmallVector<c10::Device, 1> changed;
  {
    const std::lock_guard<std::mutex> lock(Graph::get().mutex());
    std::erase(runtimes(), this);
    want_announcements(false);
    for (const auto& each : bounds_)
      if (note_limit(each->options.device)) changed.push_back(each->options.device);
  }
  for (const c10::Device device : changed) recording::budget_changes(device);
}

// The caller holds the lock. It informs recorders after it, by `recording::budget_changes`.
bool Runtime::note_limit(c10::Device device) {
  int64_t least = recording::no_budget;
  visit_runtimes([&](const Runtime& each) { least = std::min(least, each.asked_bytes(device)); });
  return recording::budget_limit(device).exchange(least, std::memory_order_relaxed) != least;
}

int64_t Runtime::asked_bytes(c10::Device device) const {
  int64_t least = recording::no_budget;
  for (const auto& each : bounds_)
    if (each->is_of(device))
      least = std::min(least, sum_or_most(each->options.bytes, each->base_bytes));
  return least;
}

void Runtime::add(std::shared_ptr<Bound> bound) {
  bool has_changed = false;
  const c10::Device device = bound->options.device;
  {
    const std::lock_guard<std::mutex> lock(Graph::get().mutex());
    if (!device.is_cpu()) far_bounds_.push_back(bound.get());
    if (bound->mover != nullptr) moving_bounds_.push_back(bound.get());
    bounds_.push_back(std::move(bound));
    min_bytes_ = least_evicted(options());
    has_changed = note_limit(device);
  }
  if (has_changed) recording::budget_changes(device);
}

void Runtime::remove(const Bound& bound) {
  bool has_changed = false;
  const c10::Device device = bound.options.device;
  {
    const std::lock_guard<std::mutex> lock(Graph::get().mutex());
    std::erase_if(bounds_, [&](const auto& each) { return each.get() == &bound; });
    for (auto* const list : {&far_bounds_, &moving_bounds_})
      list->erase(std::remove(list->begin(), list->end(), &bound), list->end());
    min_bytes_ = least_evicted(options());
    has_changed = note_limit(device);
  }
  if (has_changed) recording::budget_changes(device);
}

void Runtime::source_held(c10::Device device, int64_t bytes) {
  for (const auto& each : bounds_)
    if (each->is_of(device)) each->report.source_bytes += bytes;
}

void Runtime::note_operator() {
  for (const auto& each : bounds_) ++each->report.operators;
}

void Runtime::note_rerun(double seconds) {
  for (const auto& each : bounds_) {
    ++each->report.reruns;
    each->report.rerun_s += seconds;
  }
}

int64_t Runtime::most_bytes(c10::Device device) const {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const auto& each : bounds_)
    if (each->is_of(device)) least = std::min(least, each->most_bytes);
  return least;
}

const Bound* Runtime::refusing(c10::Device device, int64_t alive) const {
  if (bounds_.empty() || options().over != OverBudget::Throw) return nullptr;
  for (const auto& each : bounds_)
    if (each->is_of(device) && alive > each->most_bytes) return each.get();
  return nullptr;
}

bool Runtime::is_own(const c10::Stream& stream) {
  for (const c10::Stream& each : streams_)
    if (each.device() == stream.device()) return each == stream;
  streams_.push_back(stream);
  return true;
}

bool Runtime::is_learning(uint64_t call) {
  const std::lock_guard<std::mutex> lock(Graph::get().mutex());
  return CostTable::get().is_learning(call);
}

Pool& Runtime::pool_on(c10::Device device) {
  for (Pool& each : pools_)
    if (each.device() == device) return each;
  return pools_.emplace_back(device);
}

void Runtime::hold(Value& value, c10::Storage storage) {
  if (value.held) return;
  value.held = std::move(storage);
  value.cost = -1;
  if (value.is_source()) source_held(value.device, value.bytes);
  pool_on(value.device).put(value);
}

void Runtime::unpool(Value& value) { pool_on(value.device).remove(value); }

void Runtime::drop_if_unneeded(Value& value, Dead& dead) {
  if (!value.held || value.is_source() || !value.saves.empty() || value.num_locks > 0) return;
  if (value.is_rerun && Graph::get().is_needed(value)) return;
  Graph::get().let_go(value, dead);
}

int64_t Runtime::make_room(const Wanted& asked, int64_t live_bytes, Dead& dead,
                           std::shared_ptr<Moved>& copy) {
  const c10::Device device = asked.device;
  Pool& pool = pool_on(device);
  if (!moving_.empty()) settle_moves(dead);
  const int64_t wanted = live_bytes + asked.bytes, most = most_bytes(device);
  const int64_t least_alive = wanted - pool.bytes();
  int64_t freed = 0, num_dropped = 0, num_moved = 0;
  double search_s = 0;
  if (wanted > most) {
    const auto start = std::chrono::steady_clock::now();
    while (wanted - freed > most) {
      Value* const value = pool.choose({clock, cursor, min_bytes_});
      if (value == nullptr) break;
      const bool is_moved = value->is_away();
      if (options().check_values && device.is_cpu() && !is_moved)
        value->hash = hash_of(*value->held.unsafeGetStorageImpl());
      freed += value->bytes;
      ++(is_moved ? num_moved : num_dropped);
      if (asked.told != nullptr)
        asked.told->push_back({value->is_source() ? std::string_view("sources")
                                                  : std::string_view(value->record->traits->name),
                               device, value->bytes, live_bytes - freed, is_moved});
      Graph::get().let_go(*value, dead);
    }
    search_s = seconds_since(start);
    if (wanted - freed > most && copy == nullptr) copy = copy_to_wait_for(pool, asked.in_allocator);
  }
  const int64_t alive = wanted - freed;
  for (const auto& each : bounds_) {
    if (!each->is_of(device)) continue;
    BudgetReport& report = each->report;
    report.evictions += num_dropped;
    report.moves += num_moved;
    report.search_s += search_s;
    if (copy != nullptr) continue;
    report.peak_bytes = std::max(report.peak_bytes, alive - each->base_bytes);
    const bool is_over = alive > each->most_bytes;
    report.floor_bytes =
        std::max(report.floor_bytes, (is_over ? alive : least_alive) - each->base_bytes);
    if (!is_over) continue;
    ++report.over_count;
    report.over_bytes = std::max(report.over_bytes, alive - each->base_bytes - each->options.bytes);
    // See Note [Below the floor].
    if (options().over == OverBudget::Continue)
      each->most_bytes = alive + (alive - each->base_bytes) / 10;
  }
  return freed;
}

void Runtime::note_alive(c10::Device device, int64_t alive) {
  for (const auto& each : bounds_) {
    if (!each->is_of(device)) continue;
    BudgetReport& report = each->report;
    report.peak_bytes = std::max(report.peak_bytes, alive - each->base_bytes);
    if (alive <= each->most_bytes) continue;
    ++report.over_count;
    report.over_bytes = std::max(report.over_bytes, alive - each->base_bytes - each->options.bytes);
  }
}

}  // namespace remat::budget
