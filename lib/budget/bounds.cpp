#include "lib/budget/bounds.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "lib/observe/counted_memory.h"
#include "lib/observe/recording.h"

namespace remat::budget {

namespace {

int64_t sum_or_most(int64_t a, int64_t b) {
  return a > std::numeric_limits<int64_t>::max() - b ? std::numeric_limits<int64_t>::max() : a + b;
}

int64_t least_evicted(const BudgetOptions& options) {
  constexpr int64_t most = 64 << 10;
  return options.min_bytes >= 0 ? options.min_bytes : std::min(options.bytes / 1000, most);
}

}  // namespace

Bound::Bound(const BudgetOptions& asked)
    : options(asked),
      memory(asked.device.is_cpu() ? cpu_memory() : device_memory(asked.device)),
      base_bytes(memory.live_bytes()),
      most_bytes(sum_or_most(asked.bytes, base_bytes)) {
  report.budget_bytes = asked.bytes;
}

void Bounds::add(std::shared_ptr<Bound> bound) {
  if (!bound->options.device.is_cpu()) far_.push_back(bound.get());
  if (bound->mover != nullptr) moving_.push_back(bound.get());
  all_.push_back(std::move(bound));
  min_bytes_ = least_evicted(options());
}

void Bounds::remove(const Bound& bound) {
  for (auto* const list : {&far_, &moving_})
    list->erase(std::remove(list->begin(), list->end(), &bound), list->end());
  std::erase_if(all_, [&](const auto& each) { return each.get() == &bound; });
  min_bytes_ = least_evicted(options());
}

c10::SmallVector<c10::Device, 1> Bounds::devices() const {
  c10::SmallVector<c10::Device, 1> devices;
  for (const auto& each : all_) devices.push_back(each->options.device);
  return devices;
}

std::shared_ptr<Mover> Bounds::mover_on(c10::Device device) const {
  for (auto each = all_.rbegin(); each != all_.rend(); ++each)
    if ((*each)->is_of(device)) return (*each)->mover;
  return nullptr;
}

void Bounds::end_movers(c10::SmallVectorImpl<std::shared_ptr<void>>& ended) {
  for (const auto& each : all_) ended.push_back(std::exchange(each->mover, nullptr));
}

int64_t Bounds::asked_bytes(c10::Device device) const {
  int64_t least = recording::no_budget;
  for (const auto& each : all_)
    if (each->is_of(device))
      least = std::min(least, sum_or_most(each->options.bytes, each->base_bytes));
  return least;
}

void Bounds::source_held(c10::Device device, int64_t bytes) {
  for (const auto& each : all_)
    if (each->is_of(device)) each->report.source_bytes += bytes;
}

void Bounds::note_operator() {
  for (const auto& each : all_) ++each->report.operators;
}

void Bounds::note_rerun(double seconds) {
  for (const auto& each : all_) {
    ++each->report.reruns;
    each->report.rerun_s += seconds;
  }
}

int64_t Bounds::most_bytes(c10::Device device) const {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const auto& each : all_)
    if (each->is_of(device)) least = std::min(least, each->most_bytes);
  return least;
}

const Bound* Bounds::refusing(c10::Device device, int64_t alive) const {
  if (all_.empty() || options().over != OverBudget::Throw) return nullptr;
  for (const auto& each : all_)
    if (each->is_of(device) && alive > each->most_bytes) return each.get();
  return nullptr;
}

void Bounds::note_room(c10::Device device, const Room& made) {
  for (const auto& each : all_) {
    if (!each->is_of(device)) continue;
    BudgetReport& report = each->report;
    report.evictions += made.num_dropped;
    report.moves += made.num_moved;
    report.search_s += made.search_s;
    if (!made.is_final) continue;
    const bool is_over = made.alive > each->most_bytes;
    report.floor_bytes =
        std::max(report.floor_bytes, (is_over ? made.alive : made.least_alive) - each->base_bytes);
    each->note_alive(made.alive);
    // See Note [Below the floor].
    if (is_over && options().over == OverBudget::Continue)
      each->most_bytes = made.alive + (made.alive - each->base_bytes) / 10;
  }
}

void Bounds::note_alive(c10::Device device, int64_t alive) {
  for (const auto& each : all_)
    if (each->is_of(device)) each->note_alive(alive);
}

void Bound::note_alive(int64_t alive) {
  const int64_t beyond_base = alive - base_bytes;
  report.peak_bytes = std::max(report.peak_bytes, beyond_base);
  if (beyond_base > options.bytes)
    report.over_bytes = std::max(report.over_bytes, beyond_base - options.bytes);
  if (alive > most_bytes) ++report.over_count;
}

}  // namespace remat::budget
