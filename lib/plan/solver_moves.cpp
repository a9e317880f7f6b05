// The outermost level of the search if saved tensors may move. See Note [What moves].

#include <cmath>
#include <iterator>
#include <set>
#include <utility>

#include "lib/plan/cost.h"
#include "lib/plan/solver.h"

namespace remat::detail {

std::vector<FrontierTable::Item> FrontierTable::items_from(int64_t s, const Before& before) const {
  std::vector<Item> items;
  const StageCost& here = chain_.stage(s);
  const bool is_movable =
      before.holder == InputHolder::Nobody && chain_.stage(s - 1).has_movable_output;
  const int64_t input = is_movable ? chain_.input_bytes(s) : 0;
  // Adds an item, and a copy of it that moves its saved tensors if that frees bytes.
  const auto add = [&](const Item& item, int64_t movable) {
    items.push_back(item);
    if (item.next > chain_.num_stages || movable == 0) return;
    Item& moving = items.emplace_back(item);
    moving.moves = true;
    moving.charge -= movable;
    moving.then.moved_bytes = movable;
    moving.ticks += std::llround(busy_ticks_ * static_cast<double>(movable));
  };
  add({.first = s,
       .next = s + 1,
       .is_region = false,
       .moves = false,
       .need = bytes_to_save(s, chain_.num_stages, before.holder),
       .charge = chain_.charge(s, before.holder),
       .ticks = 0,
       .then = {0, holder_behind(here.saves_output)},
       .inside = {}},
      (here.saves_input ? input : 0) + here.movable_bytes);
  const Level& outermost = levels_.back();
  for (int64_t q = s + 1; outermost.has_regions && q <= chain_.num_stages; ++q)
    add({.first = s,
         .next = q,
         .is_region = true,
         .moves = false,
         .need = bytes_to_sweep(s, q - 1, chain_.num_stages),
         .charge = chain_.stage(q - 1).output_bytes,
         .ticks = sweep_ticks(s, q - 1),
         .then = {0, InputHolder::Nobody},
         .inside = holder_inside(before.holder, chain_.num_stages)},
        input);
  return items;
}

int64_t FrontierTable::ticks_of_waiting(const Before& before, const Item& item) const {
  const auto bytes = static_cast<double>(before.moved_bytes);
  if (before.moved_bytes == 0) return 0;
  const int64_t forward = forward_before_[item.next] - forward_before_[item.first];
  int64_t backward = backward_before_[item.next] - backward_before_[item.first];
  if (item.is_region) backward += sweep_ticks(item.first, item.next - 1) - frame_ticks_;
  return std::max<int64_t>(0, std::llround(store_ticks_ * bytes) - forward) +
         std::max<int64_t>(0, std::llround(load_ticks_ * bytes) - backward);
}

const Staircase& FrontierTable::inside_of(const Item& item) const {
  if (!item.is_region) return kFree;
  return stairs(levels_[levels_.back().inside], cell(item.first, item.next - 1, item.inside));
}

void FrontierTable::fill_moving() {
  std::vector<std::set<Before>> befores(static_cast<std::size_t>(chain_.num_stages) + 2);
  befores[1].insert(Before());
  for (int64_t s = 1; s <= chain_.num_stages; ++s)
    for (const Before& before : befores[s])
      for (const Item& item : items_from(s, before)) befores[item.next].insert(item.then);
  moving_.resize(befores.size());
  for (const Before& before : befores.back()) moving_.back().emplace(before, kFree);
  for (int64_t s = chain_.num_stages; s >= 1; --s) {
    for (const Before& before : befores[s]) {
      envelope_.clear();
      // Bytes are counted beyond those that the item before moves.
      for (const Item& item : items_from(s, before)) {
        const int64_t charge = item.next > chain_.num_stages ? 0 : item.charge - before.moved_bytes;
        envelope_.lower_to_sum(moving_[item.next].at(item.then), charge, inside_of(item),
                               item.ticks + ticks_of_waiting(before, item), item.need);
      }
      envelope_.thin(options_.eps);
      Staircase found = envelope_.stairs();
      for (Step& step : found) step.bytes += before.moved_bytes;
      moving_[s].emplace(before, std::move(found));
    }
  }
}

Plan FrontierTable::plan_moving(int64_t bytes) const {
  std::vector<PlanRegion> regions;
  std::vector<int64_t> moved;
  Before before;
  for (int64_t s = 1; s <= chain_.num_stages;) {
    const int64_t beyond = bytes - before.moved_bytes;
    int64_t best = kInfeasible;
    Item chosen{};
    for (const Item& item : items_from(s, before)) {
      if (beyond < item.need) continue;
      const int64_t rest = item.next > chain_.num_stages
                               ? 0
                               : value_at(moving_[item.next].at(item.then), bytes - item.charge);
      const int64_t inside = value_at(inside_of(item), beyond);
      if (rest == kInfeasible || inside == kInfeasible) continue;
      const int64_t ticks = rest + inside + item.ticks + ticks_of_waiting(before, item);
      if (!is_gain(ticks, best)) continue;
      best = ticks;
      chosen = item;
    }
    if (chosen.moves) moved.push_back(s);
    if (chosen.is_region) {
      regions.push_back({s, chosen.next - 1});
      append_regions({s, chosen.next - 1, beyond, levels_.back().inside, chosen.inside}, regions);
    }
    bytes -= chosen.charge;
    before = chosen.then;
    s = chosen.next;
  }
  return Plan(chain_.num_stages, std::move(regions), std::move(moved));
}

}  // namespace remat::detail
