#include "lib/budget/choices.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <vector>

#include "lib/base/byte_hash.h"
#include "lib/budget/cost_table.h"

namespace remat::budget {

namespace {

/// Returns the seconds of the dropped values that must be made again before the value.
double seconds_of_dropped_above(const Value& value, uint64_t walk) {
  double sum = 0;
  if (value.is_source()) return sum;  // it is read back
  value.record->walk = walk;
  std::vector<const Record*> waiting{value.record};
  while (!waiting.empty()) {
    const Record& record = *waiting.back();
    waiting.pop_back();
    for (const Read& read : record.reads) {
      Record* const made_by = read.value->record;
      if (made_by == nullptr || made_by->walk == walk || Graph::is_available(*read.value)) continue;
      made_by->walk = walk;
      sum += made_by->cost;
      waiting.push_back(made_by);
    }
  }
  return sum;
}

/// Returns the seconds of the dropped values that are made of the value.
double seconds_of_dropped_below(const Value& value, uint64_t walk) {
  double sum = 0;
  std::vector<const Value*> waiting{&value};
  while (!waiting.empty()) {
    const Value& made_of = *waiting.back();
    waiting.pop_back();
    for (const Read* read = made_of.reads; read != nullptr; read = read->next) {
      if (read->record->walk == walk) continue;
      read->record->walk = walk;
      bool is_counted = false;
      for (const Value* const result : read->record->results) {
        if (result == nullptr || Graph::is_available(*result)) continue;
        if (!is_counted) sum += read->record->cost;
        is_counted = true;
        waiting.push_back(result);
      }
    }
  }
  return sum;
}

double score(Choice choice, const Value& value, double now) {
  const double stale_s = now - value.last_use + 1e-7;
  switch (choice) {
    case Choice::LeastRecent:
      return 1 / stale_s;
    case Choice::Size:
      return 1 / static_cast<double>(value.bytes);
    default:
      break;
  }
  Graph& graph = Graph::get();
  const double above_s = seconds_of_dropped_above(value, graph.next_walk());
  const double below_s = seconds_of_dropped_below(value, graph.next_walk());
  const double own_s = value.is_source() ? 0 : value.record->cost;
  return (own_s + above_s + below_s) / (static_cast<double>(value.bytes) * stale_s);
}

}  // namespace

Trial& Trial::get() {
  static Trial trial;
  return trial;
}

Value* choose_in_trial(Trial& trial, c10::ArrayRef<Value*> values,
                       c10::function_ref<bool(const Value&)> can_drop, double now) {
  std::vector<Value*> droppable;
  for (Value* const value : values)
    if (can_drop(*value)) droppable.push_back(value);
  if (droppable.empty()) return nullptr;
  if (trial.choice == Choice::Random) {
    trial.seed = combine(trial.seed, odd_multiplier);
    return droppable[trial.seed % droppable.size()];
  }
  Value* best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (Value* const value : droppable) {
    const double found = score(trial.choice, *value, now);
    if (found >= least) continue;
    least = found;
    best = value;
  }
  return best;
}

// ---- bodies of budget_trial.h ----

void set_choice(Choice choice, uint64_t seed) {
  const std::lock_guard<std::mutex> lock(Graph::get().mutex());
  Trial::get().choice = choice;
  Trial::get().seed = seed;
}

void begin_work() {
  const std::lock_guard<std::mutex> lock(Graph::get().mutex());
  Trial::get().counts_work = true;
  Trial::get().work = {};
}

Work end_work() {
  const std::lock_guard<std::mutex> lock(Graph::get().mutex());
  Trial::get().counts_work = false;
  return Trial::get().work;
}

std::vector<CallCost> costs() {
  const std::lock_guard<std::mutex> lock(Graph::get().mutex());
  return CostTable::get().all();
}

void set_costs(const std::vector<CallCost>& costs) {
  const std::lock_guard<std::mutex> lock(Graph::get().mutex());
  CostTable::get().set_all(costs);
}

void learn_costs_from(uint32_t num_calls) {
  const std::lock_guard<std::mutex> lock(Graph::get().mutex());
  CostTable::get().num_learned = num_calls;
}

}  // namespace remat::budget
