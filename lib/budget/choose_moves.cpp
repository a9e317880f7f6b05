// The runtime's part of moving: which contents are copied away, and when. See Note [Moving].

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "lib/budget/moving.h"
#include "lib/budget/runtime.h"
#include "lib/budget/storages.h"
#include "lib/seam/on_stream.h"
#include "lib/seam/storage.h"

namespace remat::budget {

Mover* Runtime::mover_on(c10::Device device) const {
  for (auto each = bounds_.rbegin(); each != bounds_.rend(); ++each)
    if ((*each)->is_of(device)) return (*each)->mover.get();
  return nullptr;
}

void Runtime::add_source(Value& value) {
  if (value.place < 0 && has_movers() && mover_on(value.device) != nullptr &&
      is_memory_of_torch(*value.held.unsafeGetStorageImpl()))
    pool_on(value.device).put(value);
}

Value* Runtime::source_to_move(const at::Tensor& saved, Dead& dead) {
  if (!has_movers()) return nullptr;
  const c10::StorageImpl& storage = *storage_of(saved);
  const Mover* const mover = mover_on(saved.device());
  if (mover == nullptr || static_cast<int64_t>(storage.nbytes()) < mover->min_bytes() ||
      !is_memory_of_torch(storage) || !is_end_known(storage) ||
      seam::has_names(*saved.unsafeGetTensorImpl()) ||
      saved.unsafeGetTensorImpl()->is_wrapped_number() ||
      (!saved.is_cpu() && !is_own(current_stream(saved.device()))))
    return nullptr;
  return &Graph::get().value_or_source(saved, *this, dead);
}

bool Runtime::can_move(Value& value, const Mover& mover) {
  if (value.num_locks > 0 || value.moved != nullptr || value.held.use_count() != 1) return false;
  pool_on(value.device).count(value);
  return !mover.is_stopped() && value.bytes >= std::max(mover.min_bytes(), min_bytes_) &&
         value.bytes > 0 && !value.has_changed() &&
         static_cast<int64_t>(value.held.nbytes()) == value.bytes;
}

std::shared_ptr<Moved> Runtime::start_move(Value& value) {
  for (auto each = bounds_.rbegin(); each != bounds_.rend(); ++each)
    if ((*each)->is_of(value.device)) {
      value.moved = std::make_shared<Moved>((*each)->mover, value.held);
      break;
    }
  moving_.push_back(&value);
  return value.moved;
}

void Runtime::end_move(Value& value, Dead& dead) {
  if (!value.is_away()) std::erase(moving_, &value);
  dead.moves.push_back(std::exchange(value.moved, nullptr));
}

void Runtime::settle_moves(Dead& dead) {
  std::erase_if(moving_, [&](Value* const value) {
    if (!value->moved->is_over()) return false;
    value->moved->settle();
    value->cost = -1;
    if (!value->is_away()) dead.moves.push_back(std::exchange(value->moved, nullptr));
    return true;
  });
}

std::shared_ptr<Moved> Runtime::copy_to_wait_for(Pool& pool, bool in_allocator) {
  if (!has_movers()) return nullptr;
  for (const Value* const value : moving_)
    if (value->device == pool.device() && value->moved->can_wait(in_allocator)) return value->moved;
  const Mover* const mover = mover_on(pool.device());
  if (mover == nullptr || !pool.device().is_cpu()) return nullptr;
  for (Value* const value : pool.values())
    if (value->is_source() && can_move(*value, *mover)) return start_move(*value);
  return nullptr;
}

void Runtime::choose_moves(Pool& pool, const Mover& mover, int64_t most_ahead,
                           std::vector<std::shared_ptr<Moved>>& chosen) {
  // The work of a walk for each value would grow with the square of the pool's size.
  if (!pool.has_grown()) return;
  int64_t ahead = 0;
  std::vector<std::pair<double, Value*>> found;
  for (Value* const value : pool.values()) {
    if (value->moved != nullptr)
      ahead += value->bytes;
    else if (can_move(*value, mover) && value->is_source())
      chosen.push_back(start_move(*value));
    else if (!value->is_source() && can_move(*value, mover) &&
             !(value->cost >= 0 && value->cost <= mover.seconds(value->bytes)))
      found.emplace_back(value->last_save(), value);
  }
  constexpr std::size_t num_close = 16;
  const std::size_t count = std::min(found.size(), num_close);
  std::partial_sort(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(count), found.end());
  for (std::size_t i = 0; i < count && ahead < most_ahead; ++i) {
    Value& value = *found[i].second;
    const double seconds = mover.seconds(value.bytes);
    const bool is_known = !mover.is_learning();
    if (!is_known && !moving_.empty()) return;  // the first copies are timed one by one
    look_closely(value);
    if (is_known && value.cost <= seconds) continue;
    chosen.push_back(start_move(value));
    ahead += value.bytes;
  }
}

void Runtime::end_step(Dead& dead) {
  Graph::get().cut(*this, dead);
  // Threads of the engine may keep this runtime longer than its values.
  if (is_closed_)
    for (const auto& each : bounds_) dead.moves.push_back(std::exchange(each->mover, nullptr));
}

void Runtime::close(Dead& dead) {
  is_closed_ = true;
  if (!has_saved()) end_step(dead);
}

void Runtime::move_ahead() {
  std::vector<std::shared_ptr<Moved>> chosen;
  for (Bound* const bound : moving_bounds_) {
    const c10::Device device = bound->options.device;
    const int64_t live = bound->memory.live_bytes(), quarter = bound->options.bytes / 4;
    std::optional<OnStream> on;
    {
      Dead dead;
      const std::lock_guard<std::mutex> lock(Graph::get().mutex());
      settle_moves(dead);
      const Mover* const mover = mover_on(device);
      if (mover != nullptr && live > most_bytes(device) - quarter)
        choose_moves(pool_on(device), *mover, quarter, chosen);
      for (const c10::Stream& each : streams_)
        if (each.device() == device && !chosen.empty()) on.emplace(each);
    }
    for (const auto& each : chosen) each->begin();
    chosen.clear();
    if (const auto mover = bound->mover) mover->warn_if_stopped();
  }
}

}  // namespace remat::budget
