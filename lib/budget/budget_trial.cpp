// Bodies of budget_trial.h.

#include "remat/budget_trial.h"

#include <mutex>
#include <vector>

#include "lib/budget/cost_table.h"
#include "lib/budget/graph.h"
#include "lib/budget/trial.h"

namespace remat::budget {

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
