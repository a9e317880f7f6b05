#include "lib/budget/moves.h"

#include <algorithm>
#include <utility>

namespace remat::budget {

bool Moves::can_move(Pool& pool, Value& value, const Mover& mover) const {
  if (value.num_locks > 0 || value.moved != nullptr || value.held.use_count() != 1) return false;
  pool.count(value);
  return !mover.is_stopped() && value.bytes >= std::max(mover.min_bytes(), bounds_.min_bytes()) &&
         value.bytes > 0 && !value.has_changed() &&
         static_cast<int64_t>(value.held.nbytes()) == value.bytes;
}

std::shared_ptr<Moved> Moves::start(Value& value) {
  value.moved = std::make_shared<Moved>(bounds_.mover_on(value.device), value.held);
  under_way_.push_back(&value);
  return value.moved;
}

void Moves::end(Value& value, Dead& dead) {
  if (!value.is_away()) std::erase(under_way_, &value);
  dead.moves.push_back(std::exchange(value.moved, nullptr));
}

void Moves::settle(Dead& dead) {
  std::erase_if(under_way_, [&](Value* const value) {
    if (!value->moved->is_over()) return false;
    value->moved->settle();
    value->look.cost = -1;
    if (!value->is_away()) dead.moves.push_back(std::exchange(value->moved, nullptr));
    return true;
  });
}

std::shared_ptr<Moved> Moves::copy_to_wait_for(Pool& pool, bool in_allocator) {
  if (!bounds_.has_movers()) return nullptr;
  for (const Value* const value : under_way_)
    if (value->device == pool.device() && value->moved->can_wait(in_allocator)) return value->moved;
  const std::shared_ptr<Mover> mover = bounds_.mover_on(pool.device());
  if (mover == nullptr || !pool.device().is_cpu()) return nullptr;
  for (Value* const value : pool.values())
    if (value->is_source() && can_move(pool, *value, *mover)) return start(*value);
  return nullptr;
}

std::vector<std::shared_ptr<Moved>> Moves::choose(Pool& pool, const Mover& mover,
                                                  int64_t most_ahead) {
  std::vector<std::shared_ptr<Moved>> chosen;
  // The work of a walk for each value would grow with the square of the pool's size.
  if (!pool.has_grown()) return chosen;
  int64_t ahead = 0;
  std::vector<std::pair<double, Value*>> found;
  for (Value* const value : pool.values()) {
    if (value->moved != nullptr)
      ahead += value->bytes;
    else if (can_move(pool, *value, mover) && value->is_source())
      chosen.push_back(start(*value));
    else if (!value->is_source() && can_move(pool, *value, mover) &&
             !(value->look.cost >= 0 && value->look.cost <= mover.seconds(value->bytes)))
      found.emplace_back(value->last_save(), value);
  }
  constexpr std::size_t num_close = 16;
  const std::size_t count = std::min(found.size(), num_close);
  std::partial_sort(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(count), found.end());
  for (std::size_t i = 0; i < count && ahead < most_ahead; ++i) {
    Value& value = *found[i].second;
    const double seconds = mover.seconds(value.bytes);
    const bool is_known = !mover.is_learning();
    if (!is_known && !under_way_.empty()) return chosen;  // the first copies are timed one by one
    look_closely(value);
    if (is_known && value.look.cost <= seconds) continue;
    chosen.push_back(start(value));
    ahead += value.bytes;
  }
  return chosen;
}

}  // namespace remat::budget
