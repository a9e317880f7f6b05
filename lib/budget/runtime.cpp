#include "lib/budget/runtime.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <string_view>
#include <utility>

#include "lib/budget/storages.h"
#include "lib/observe/counted_memory.h"
#include "lib/seam/on_stream.h"
#include "lib/seam/storage.h"

namespace remat::budget {

namespace {

std::vector<Runtime*>& runtimes() {
  static auto* const all = new std::vector<Runtime*>;  // leaked: tensors outlive static objects
  return *all;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Sets `recording::budget_limit` of the device. Returns whether it has changed. The caller holds
/// the lock, and informs recorders after it, by `recording::budget_changes`.
bool note_limit(c10::Device device) {
  int64_t least = recording::no_budget;
  visit_runtimes(
      [&](const Runtime& each) { least = std::min(least, each.bounds().asked_bytes(device)); });
  return recording::budget_limit(device).exchange(least, std::memory_order_relaxed) != least;
}

}  // namespace

void visit_runtimes(c10::function_ref<void(Runtime&)> visitor) {
  for (Runtime* const each : runtimes()) visitor(*each);
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
    for (const c10::Device device : bounds_.devices())
      if (note_limit(device)) changed.push_back(device);
  }
  for (const c10::Device device : changed) recording::budget_changes(device);
}

void Runtime::add(std::shared_ptr<Bound> bound) {
  bool has_changed = false;
  const c10::Device device = bound->options.device;
  {
    const std::lock_guard<std::mutex> lock(Graph::get().mutex());
    bounds_.add(std::move(bound));
    has_changed = note_limit(device);
  }
  if (has_changed) recording::budget_changes(device);
}

void Runtime::remove(const Bound& bound) {
  bool has_changed = false;
  const c10::Device device = bound.options.device;
  {
    const std::lock_guard<std::mutex> lock(Graph::get().mutex());
    bounds_.remove(bound);
    has_changed = note_limit(device);
  }
  if (has_changed) recording::budget_changes(device);
}

bool Runtime::is_own(const c10::Stream& stream) {
  for (const c10::Stream& each : streams_)
    if (each.device() == stream.device()) return each == stream;
  streams_.push_back(stream);
  return true;
}

Pool& Runtime::pool_on(c10::Device device) {
  for (Pool& each : pools_)
    if (each.device() == device) return each;
  return pools_.emplace_back(device);
}

void Runtime::hold(Value& value, c10::Storage storage) {
  if (value.held) return;
  value.held = std::move(storage);
  value.look.cost = -1;
  if (value.is_source()) bounds_.source_held(value.device, value.bytes);
  pool_on(value.device).put(value);
}

void Runtime::unpool(Value& value) { pool_on(value.device).remove(value); }

void Runtime::drop_if_unneeded(Value& value, Dead& dead) {
  if (!value.held || value.is_source() || !value.saves.empty() || value.num_locks > 0) return;
  if (value.is_rerun && value.is_needed()) return;
  Graph::get().let_go(value, dead);
}

int64_t Runtime::make_room(const Wanted& asked, int64_t live_bytes, Dead& dead,
                           std::shared_ptr<Moved>& copy) {
  const c10::Device device = asked.device;
  Pool& pool = pool_on(device);
  moves_.settle(dead);
  const int64_t wanted = live_bytes + asked.bytes, most = bounds_.most_bytes(device);
  const int64_t least_alive = wanted - pool.bytes();
  int64_t freed = 0, num_dropped = 0, num_moved = 0;
  double search_s = 0;
  if (wanted > most) {
    const auto start = std::chrono::steady_clock::now();
    while (wanted - freed > most) {
      Value* const value = pool.choose({clock, cursor, bounds_.min_bytes()});
      if (value == nullptr) break;
      const bool is_moved = value->is_away();
      if (bounds_.options().check_values && device.is_cpu() && !is_moved)
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
    if (wanted - freed > most && copy == nullptr)
      copy = moves_.copy_to_wait_for(pool, asked.in_allocator);
  }
  bounds_.note_room(device, {.num_dropped = num_dropped,
                             .num_moved = num_moved,
                             .search_s = search_s,
                             .is_final = copy == nullptr,
                             .alive = wanted - freed,
                             .least_alive = least_alive});
  return freed;
}

void Runtime::add_source(Value& value) {
  if (value.pooled.place < 0 && bounds_.has_movers() && bounds_.mover_on(value.device) != nullptr &&
      is_memory_of_torch(*value.held.unsafeGetStorageImpl()))
    pool_on(value.device).put(value);
}

Value* Runtime::source_to_move(const at::Tensor& saved, Dead& dead) {
  if (!bounds_.has_movers()) return nullptr;
  const c10::StorageImpl& storage = *storage_of(saved);
  const std::shared_ptr<Mover> mover = bounds_.mover_on(saved.device());
  if (mover == nullptr || static_cast<int64_t>(storage.nbytes()) < mover->min_bytes() ||
      !is_memory_of_torch(storage) || !is_end_known(storage) ||
      seam::has_names(*saved.unsafeGetTensorImpl()) ||
      saved.unsafeGetTensorImpl()->is_wrapped_number() ||
      (!saved.is_cpu() && !is_own(current_stream(saved.device()))))
    return nullptr;
  return &Graph::get().value_or_source(saved, *this, dead);
}

void Runtime::end_move(Value& value, Dead& dead) { moves_.end(value, dead); }

void Runtime::move_ahead() {
  for (Bound* const bound : bounds_.moving()) {
    const c10::Device device = bound->options.device;
    const int64_t live = bound->memory.live_bytes(), quarter = bound->options.bytes / 4;
    std::optional<OnStream> on;
    std::vector<std::shared_ptr<Moved>> chosen;
    {
      Dead dead;
      const std::lock_guard<std::mutex> lock(Graph::get().mutex());
      moves_.settle(dead);
      const std::shared_ptr<Mover> mover = bounds_.mover_on(device);
      if (mover != nullptr && live > bounds_.most_bytes(device) - quarter)
        chosen = moves_.choose(pool_on(device), *mover, quarter);
      for (const c10::Stream& each : streams_)
        if (each.device() == device && !chosen.empty()) on.emplace(each);
    }
    for (const auto& each : chosen) each->begin();
    if (const auto mover = bound->mover) mover->warn_if_stopped();
  }
}

void Runtime::end_step(Dead& dead) {
  Graph::get().cut(*this, dead);
  // Threads of the engine may keep this runtime longer than its values.
  if (is_closed_) bounds_.end_movers(dead.moves);
}

void Runtime::close(Dead& dead) {
  is_closed_ = true;
  if (!has_saved()) end_step(dead);
}

}  // namespace remat::budget
