#include "lib/budget/runtime.h"

#include <c10/util/flat_hash_map.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

#include "lib/budget/rerun.h"
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

void allocation_begins(int64_t bytes, int64_t live) {
  Dead dead;  // freed before the allocation, after the lock
  int64_t over_by = 0, needed = 0, floor = 0;
  {
    const std::lock_guard<std::mutex> lock(Graph::get().mutex());
    int64_t freed = 0;
    for (Runtime* const each : runtimes()) {
      freed += each->make_room(bytes, live - freed, dead);
      const int64_t over = live - freed + bytes - each->bound();
      if (each->options().over == OverBudget::Throw && over > over_by) {
        over_by = over;
        needed = sum_or_most(each->options().bytes, over);
        floor = each->floor_bytes();
      }
    }
  }
  if (over_by > 0) {
    const BudgetExceeded error(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
        fmt::format("remat::BudgetGuard: an allocation of {} bytes did not fit into the budget, and nothing more could "
                    "be dropped.\nCause: what operators read and write, and what the program holds, is over the budget "
                    "by itself.\nDo: ask for {} bytes or more, or let OverBudget::Continue exceed the budget.",
                    bytes, needed),
        needed, floor);
    raise_in_binding(error);
    throw error;
  }
}

void data_freed(const void* storage, const void* data) noexcept {
  Graph::get().data_freed(storage, data);
}

std::atomic<BudgetRaise> raise_of_binding{nullptr};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

void visit_runtimes(c10::function_ref<void(Runtime&)> visitor) {
  for (Runtime* const each : runtimes()) visitor(*each);
}

void raise_in_binding(const c10::Error& error) {
  if (const BudgetRaise raise = raise_of_binding.load(std::memory_order_acquire)) raise(error);
}

void watch_allocations() {
  static constexpr AllocationCallbacks callbacks{allocation_begins, data_freed};
  static const bool is_set = (set_allocation_callbacks(callbacks), true);
  (void)is_set;
}

struct CostTable::Entry {
  float seconds;
  uint32_t num_calls;
};

CostTable& CostTable::get() {
  static CostTable table;
  return table;
}

float CostTable::cost(uint64_t call, float measured_s) {
  static auto* const entries = new ska::flat_hash_map<uint64_t, Entry>;
  Entry& entry = entries->emplace(call, Entry{measured_s, 0}).first->second;
  if (entry.num_calls < num_learned) {
    ++entry.num_calls;
    entry.seconds = std::min(entry.seconds, measured_s);
  }
  return entry.seconds;
}

Runtime::Runtime(const BudgetOptions& options, int64_t live_bytes)
    : options_(options),
      base_bytes_(live_bytes),
      min_bytes_(least_evicted(options)),
      bound_(sum_or_most(options.bytes, live_bytes)) {
  report_->budget_bytes = options.bytes;
  const std::lock_guard<std::mutex> lock(Graph::get().mutex());
  runtimes().push_back(this);
  want_announcements(true);
}

Runtime::~Runtime() {
  const std::lock_guard<std::mutex> lock(Graph::get().mutex());
  std::erase(runtimes(), this);
  want_announcements(false);
}

void Runtime::hold(Value& value, c10::Storage storage) {
  if (value.held) return;
  value.held = std::move(storage);
  value.cost = -1;
  value.place = static_cast<int32_t>(pool_.size());
  pool_.push_back(&value);
  pool_bytes_ += value.bytes;
}

// What an optimizer's step records is settled when the next forward begins. The work is a part of that
// of the calls since: each value in a storage is looked at.
void Runtime::operator_begins(bool is_in_backward, bool grad_mode, Dead& dead) {
  if (is_in_backward) {
    has_run_backward_ = true;
    return;
  }
  constexpr int64_t many = 4096, calls_a_value = 8;
  Graph& graph = Graph::get();
  const auto calls = static_cast<int64_t>(graph.num_records() - settled_at_);
  const bool is_new_step = grad_mode && has_run_without_grad_ && num_saves_ == 0;
  has_run_without_grad_ = !grad_mode;
  const bool is_due = has_run_backward_ || is_new_step ? calls * calls_a_value >= graph.num_listed()
                                                       : calls >= many && calls >= graph.num_listed();
  if (!is_due) return;
  settled_at_ = graph.num_records();
  has_run_backward_ = false;
  graph.settle(*this, dead);
}

void Runtime::unpool(Value& value) {
  if (value.place < 0) return;
  const auto place = static_cast<std::size_t>(std::exchange(value.place, -1));
  pool_[place] = pool_.back();
  if (pool_[place] != &value) pool_[place]->place = static_cast<int32_t>(place);
  pool_.pop_back();
  pool_bytes_ -= value.bytes;
}

void Runtime::drop_if_unneeded(Value& value, Dead& dead) {
  if (!value.held || value.is_source() || !value.saves.empty() || value.num_locks > 0) return;
  if (value.is_rerun && Graph::is_wanted_by_evicted(value)) return;
  Graph::get().let_go(value, dead);
}

double Runtime::score_now(const Value& value) const {
  const double distance = std::max(cursor - value.first, 0.0) + 1e-6;
  return value.cost / (static_cast<double>(value.bytes) * std::sqrt(distance));
}

// Seconds of what was dropped of its making, and when backward will read it or what is made of it.
void Runtime::look_closely(Value& value) {
  constexpr std::size_t max_seen = 64;
  std::array<const Record*, max_seen> records;
  std::size_t num_seen = 0;
  const uint64_t walk = ++walk_;
  records[num_seen++] = value.record;
  value.record->walk = walk;
  float cost = value.record->cost;
  for (std::size_t next = 0; next < num_seen; ++next)
    for (const Read& read : records[next]->reads) {
      Record* const made_by = read.value->record;
      if (made_by == nullptr || made_by->walk == walk || Graph::has_content(*read.value)) continue;
      if (num_seen == max_seen) break;
      made_by->walk = walk;
      records[num_seen++] = made_by;
      cost += made_by->cost;
    }
  const auto last_save = [](const Value& one) {
    return one.saves.empty() ? -1.0 : *std::max_element(one.saves.begin(), one.saves.end());
  };
  double first = last_save(value);
  std::array<const Value*, max_seen> made_of;
  num_seen = 0;
  made_of[num_seen++] = &value;
  std::size_t num_records = 0;
  const uint64_t walk_down = ++walk_;
  for (std::size_t next = 0; next < num_seen; ++next)
    for (const Read* read = made_of[next]->reads; read != nullptr; read = read->next) {
      if (read->record->walk == walk_down || num_records == max_seen) continue;
      read->record->walk = walk_down;
      ++num_records;
      for (const Value* const result : read->record->results) {
        if (result == nullptr || Graph::has_content(*result)) continue;
        first = std::max(first, last_save(*result));
        if (num_seen < max_seen) made_of[num_seen++] = result;
      }
    }
  value.cost = first >= 0 ? cost : 0;
  value.first = first;
}

Value* Runtime::choose() {
  constexpr std::size_t num_close = 16;
  std::array<std::pair<double, Value*>, num_close> cheapest;
  std::size_t count = 0;
  for (Value* const value : pool_) {
    if (value->num_locks > 0 || value->bytes < min_bytes_ || value->bytes == 0 ||
        value->held.use_count() > 1)
      continue;
    const double score = value->cost < 0 ? -1.0 : score_now(*value);
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

int64_t Runtime::make_room(int64_t bytes, int64_t live_bytes, Dead& dead) {
  const int64_t wanted = live_bytes + bytes;
  report_->floor_bytes = std::max(report_->floor_bytes, wanted - pool_bytes_ - base_bytes_);
  int64_t freed = 0;
  if (wanted > bound_) {
    const auto start = std::chrono::steady_clock::now();
    while (wanted - freed > bound_) {
      Value* const value = choose();
      if (value == nullptr) break;
      if (options_.check_values) value->hash = hash_of(*value->held.unsafeGetStorageImpl());
      freed += value->bytes;
      ++report_->evictions;
      Graph::get().let_go(*value, dead);
    }
    report_->search_s += seconds_since(start);
  }
  const int64_t alive = wanted - freed;
  report_->peak_bytes = std::max(report_->peak_bytes, alive - base_bytes_);
  if (alive <= bound_) return freed;
  report_->floor_bytes = std::max(report_->floor_bytes, alive - base_bytes_);
  ++report_->over_count;
  report_->over_bytes =
      std::max(report_->over_bytes, alive - base_bytes_ - options_.bytes);
  // See Note [Below the floor].
  if (options_.over == OverBudget::Continue) bound_ = alive + (alive - base_bytes_) / 10;
  return freed;
}

}  // namespace remat::budget

void remat::set_budget_raise(BudgetRaise raise) {
  budget::raise_of_binding.store(raise, std::memory_order_release);
}
