#include "lib/budget/runtime.h"

#include <c10/util/flat_hash_map.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <limits>
#include <string_view>
#include <utility>

#include "lib/budget/choices.h"
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

Runtime::Pool& Runtime::pool_on(c10::Device device) {
  for (Pool& each : pools_)
    if (each.device == device) return each;
  return pools_.emplace_back(Pool{device});
}

void Runtime::hold(Value& value, c10::Storage storage) {
  if (value.held) return;
  value.held = std::move(storage);
  value.cost = -1;
  if (value.is_source()) source_held(value.device, value.bytes);
  put_into_pool(value);
}

void Runtime::put_into_pool(Value& value) {
  Pool& pool = pool_on(value.device);
  value.place = static_cast<int32_t>(pool.values.size());
  pool.values.push_back(&value);
  ++pool.num_added;
  value.is_counted = !value.is_source() || value.is_away();
  if (value.is_counted) pool.bytes += value.bytes;
}

void Runtime::unpool(Value& value) {
  if (value.place < 0) return;
  const auto place = static_cast<std::size_t>(std::exchange(value.place, -1));
  Pool& pool = pool_on(value.device);
  pool.values[place] = pool.values.back();
  if (pool.values[place] != &value) pool.values[place]->place = static_cast<int32_t>(place);
  pool.values.pop_back();
  if (std::exchange(value.is_counted, false)) pool.bytes -= value.bytes;
  if (std::exchange(value.is_short, false))
    *std::find(pool.shortlist.begin(), pool.shortlist.end(), &value) = nullptr;
}

void Runtime::drop_if_unneeded(Value& value, Dead& dead) {
  if (!value.held || value.is_source() || !value.saves.empty() || value.num_locks > 0) return;
  if (value.is_rerun && Graph::get().is_needed(value)) return;
  Graph::get().let_go(value, dead);
}

double Runtime::score_now(const Value& value) const {
  const double distance = std::max(cursor - value.first, 0.0) + 1e-6;
  return value.cost / (static_cast<double>(value.bytes) * std::sqrt(distance));
}

double Runtime::known_score(const Value& value) const {
  return value.cost < 0 ? -1.0 : score_now(value);
}

// Computes the time of a rerun, and the clock at which backward needs its result first.
void Runtime::look_closely(Value& value) {
  constexpr std::size_t max_seen = 64;
  std::array<const Record*, max_seen> records;
  std::size_t num_seen = 0;
  const uint64_t walk = Graph::get().next_walk();
  double cost = 0;
  if (value.is_away()) {
    cost = value.moved->seconds_back();
  } else {
    records[num_seen++] = value.record;
    value.record->walk = walk;
    cost = value.record->cost;
  }
  for (std::size_t next = 0; next < num_seen; ++next)
    for (const Read& read : records[next]->reads) {
      Record* const made_by = read.value->record;
      if (read.value->is_away() && !Graph::has_content(*read.value))
        cost += read.value->moved->seconds_back();
      if (made_by == nullptr || made_by->walk == walk || Graph::is_available(*read.value)) continue;
      if (num_seen == max_seen) break;
      made_by->walk = walk;
      records[num_seen++] = made_by;
      cost += made_by->cost;
    }
  double first = value.last_save();
  std::array<const Value*, max_seen> made_of;
  num_seen = 0;
  made_of[num_seen++] = &value;
  std::size_t num_records = 0;
  const uint64_t walk_down = Graph::get().next_walk();
  for (std::size_t next = 0; next < num_seen; ++next)
    for (const Read* read = made_of[next]->reads; read != nullptr; read = read->next) {
      if (read->record->walk == walk_down || num_records == max_seen) continue;
      read->record->walk = walk_down;
      ++num_records;
      for (const Value* const result : read->record->results) {
        if (result == nullptr || Graph::is_available(*result)) continue;
        first = std::max(first, result->last_save());
        if (num_seen < max_seen) made_of[num_seen++] = result;
      }
    }
  value.cost = first >= 0 ? static_cast<float>(cost) : 0;
  value.first = first;
}

bool Runtime::can_drop(const Value& value) const {
  return value.num_locks == 0 && (!value.is_source() || value.is_away()) &&
         value.bytes >= min_bytes_ && value.bytes > 0 && value.held.use_count() == 1;
}

Value* Runtime::cheapest_of(c10::ArrayRef<Value*> values) {
  constexpr std::size_t num_close = 16;
  std::array<std::pair<double, Value*>, num_close> cheapest;
  std::size_t count = 0;
  for (Value* const value : values) {
    if (value == nullptr || !can_drop(*value)) continue;
    const double score = known_score(*value);
    if (count == num_close && score >= cheapest[count - 1].first) continue;
    std::size_t place = count < num_close ? count++ : count - 1;
    for (; place > 0 && cheapest[place - 1].first > score; --place)
      cheapest[place] = cheapest[place - 1];
    cheapest[place] = {score, value};
  }
  Value* best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < count; ++i) {
    look_closely(*cheapest[i].second);
    const double score = score_now(*cheapest[i].second);
    if (score < least) {
      least = score;
      best = cheapest[i].second;
    }
  }
  return best;
}

void Runtime::make_shortlist(Pool& pool) {
  std::vector<std::pair<double, Value*>> all;
  all.reserve(pool.values.size());
  for (Value* const value : pool.values)
    if (can_drop(*value)) all.emplace_back(known_score(*value), value);
  const std::size_t count = std::min(all.size(), pool.values.size() / num_pool_for_one);
  std::nth_element(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count), all.end());
  for (Value* const value : pool.shortlist)
    if (value != nullptr) value->is_short = false;
  pool.shortlist.clear();
  for (std::size_t i = 0; i < count; ++i) {
    all[i].second->is_short = true;
    pool.shortlist.push_back(all[i].second);
  }
  pool.num_choices_left = count / 2;
}

// A large pool is not walked for each choice: the work would grow with the square of its size.
Value* Runtime::choose(Pool& pool) {
  constexpr std::size_t max_walked = 1024;
  if (Trial& trial = Trial::get(); trial.choice != Choice::Reverse)
    return choose_in_trial(
        trial, pool.values, [this](const Value& value) { return can_drop(value); }, clock);
  if (pool.values.size() <= max_walked) return cheapest_of(pool.values);
  if (pool.num_choices_left > 0) {
    --pool.num_choices_left;
    if (Value* const value = cheapest_of(pool.shortlist)) return value;
  }
  make_shortlist(pool);
  if (Value* const value = cheapest_of(pool.shortlist)) return value;
  return cheapest_of(pool.values);
}

int64_t Runtime::make_room(const Wanted& asked, int64_t live_bytes, Dead& dead,
                           std::shared_ptr<Moved>& copy) {
  const c10::Device device = asked.device;
  Pool& pool = pool_on(device);
  if (!moving_.empty()) settle_moves(dead);
  const int64_t wanted = live_bytes + asked.bytes, most = most_bytes(device);
  const int64_t least_alive = wanted - pool.bytes;
  int64_t freed = 0, num_dropped = 0, num_moved = 0;
  double search_s = 0;
  if (wanted > most) {
    const auto start = std::chrono::steady_clock::now();
    while (wanted - freed > most) {
      Value* const value = choose(pool);
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
