#include "lib/base/recompute_lock.h"

#include <algorithm>

namespace remat {

namespace {
bool is_one_of(const TurnTaker* taker, Turns::Takers takers) {
  return std::find(takers.begin(), takers.end(), taker) != takers.end();
}
}  // namespace

bool Turns::take(const void* subject, const TurnTaker& taker, std::chrono::seconds longest_wait) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_free = [&] {
    const auto found = holders_.find(subject);
    if (found == holders_.end()) return true;
    const Holder& latest = found->second.back();
    return latest.thread == std::this_thread::get_id() || latest.num_waits > 0 ||
           taker.is_inside(latest.taker);
  };
  while (!is_free()) {
    const uint64_t before = num_given_back_;
    const bool has_moved = changed_.wait_for(
        lock, longest_wait, [&] { return is_free() || num_given_back_ != before; });
    if (!has_moved) return false;
  }
  holders_[subject].push_back({&taker, std::this_thread::get_id(), 0});
  return true;
}

void Turns::give_back(const void* subject) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = holders_.find(subject);
  found->second.pop_back();
  if (found->second.empty()) holders_.erase(found);
  ++num_given_back_;
  changed_.notify_all();
}

void Turns::suspend(Takers takers) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [subject, holders] : holders_)
    for (Holder& each : holders)
      if (is_one_of(each.taker, takers)) ++each.num_waits;
  changed_.notify_all();
}

void Turns::resume(Takers takers) noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] {
    return std::all_of(holders_.begin(), holders_.end(), [&](const auto& subject) {
      const std::vector<Holder>& holders = subject.second;
      return is_one_of(holders.back().taker, takers) ||
             std::none_of(holders.begin(), holders.end(),
                          [&](const Holder& each) { return is_one_of(each.taker, takers); });
    });
  });
  for (auto& [subject, holders] : holders_)
    for (Holder& each : holders)
      if (is_one_of(each.taker, takers)) --each.num_waits;
}

Turns& turns() {
  static auto* const all = new Turns;  // leaked: recomputes may run in static destructors
  return *all;
}

}  // namespace remat
