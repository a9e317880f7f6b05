#include "lib/turns.h"

namespace remat {

bool Turns::take(const void* subject, const TurnTaker& taker, std::chrono::seconds longest_wait) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_free = [&] {
    const auto found = holders_.find(subject);
    if (found == holders_.end()) return true;
    const Holder& latest = found->second.back();
    return latest.thread == std::this_thread::get_id() || taker.is_inside(latest.taker);
  };
  if (!given_back_.wait_for(lock, longest_wait, is_free)) return false;
  holders_[subject].push_back({&taker, std::this_thread::get_id()});
  return true;
}

void Turns::give_back(const void* subject) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = holders_.find(subject);
  found->second.pop_back();
  if (found->second.empty()) holders_.erase(found);
  given_back_.notify_all();
}

Turns& turns() {
  static auto* const all = new Turns;  // leaked: recomputes may run in static destructors
  return *all;
}

}  // namespace remat
