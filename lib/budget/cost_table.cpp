#include "lib/budget/cost_table.h"

#include <algorithm>
#include <limits>

namespace remat::budget {

struct CostTable::Entry {
  float seconds = std::numeric_limits<float>::infinity();
  uint32_t num_calls = 0;
  int64_t bytes = 0;
};

CostTable& CostTable::get() {
  static CostTable table;
  return table;
}

ska::flat_hash_map<uint64_t, CostTable::Entry>& CostTable::entries() {
  static auto* const all = new ska::flat_hash_map<uint64_t, Entry>;  // leaked: used until late
  return *all;
}

bool CostTable::is_learning(uint64_t call) const {
  const auto found = entries().find(call);
  return found == entries().end() || found->second.num_calls < num_learned;
}

int64_t CostTable::bytes(uint64_t call) const {
  const auto found = entries().find(call);
  return found == entries().end() ? 0 : found->second.bytes;
}

void CostTable::note_bytes(uint64_t call, int64_t bytes) {
  Entry& entry = entries()[call];
  entry.bytes = std::max(entry.bytes, bytes);
}

float CostTable::cost(uint64_t call, float measured_s) {
  Entry& entry = entries()[call];
  if (entry.num_calls < num_learned) {
    ++entry.num_calls;
    entry.seconds = std::min(entry.seconds, measured_s);
  }
  return entry.seconds;
}

std::vector<CallCost> CostTable::all() const {
  std::vector<CallCost> found;
  for (const auto& [call, entry] : entries())
    if (entry.num_calls > 0) found.push_back({call, entry.seconds});
  return found;
}

void CostTable::set_all(const std::vector<CallCost>& costs) {
  for (auto& [call, entry] : entries()) entry = {.bytes = entry.bytes};
  for (const CallCost& each : costs) {
    Entry& entry = entries()[each.call];
    entry.seconds = each.seconds;
    entry.num_calls = std::numeric_limits<uint32_t>::max();
  }
}

}  // namespace remat::budget
