#include "lib/base/recompute_lock.h"

#include <algorithm>
#include <functional>

#include "lib/base/waiting.h"

namespace remat {

namespace {
bool is_one_of(const LockOwner* owner, RecomputeLock::Owners owners) {
  return std::find(owners.begin(), owners.end(), owner) != owners.end();
}
}  // namespace

bool RecomputeLock::is_free(const void* subject, const LockOwner& owner) const {
  const auto found = holders_.find(subject);
  if (found == holders_.end()) return true;
  const Holder& latest = found->second.back();
  return latest.thread == std::this_thread::get_id() || latest.num_waits > 0 ||
         owner.is_inside(latest.owner);
}

bool RecomputeLock::acquire(const void* subject, const LockOwner& owner,
                            std::chrono::milliseconds longest_wait) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!is_free(subject, owner)) {
    const auto has_moved = [&, before = num_releases_] {
      return is_free(subject, owner) || num_releases_ != before;
    };
    if (!wait_until(has_moved, lock, changed_, longest_wait)) return false;
  }
  holders_[subject].push_back({&owner, std::this_thread::get_id(), 0});
  return true;
}

void RecomputeLock::release(const void* subject) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = holders_.find(subject);
  found->second.pop_back();
  if (found->second.empty()) holders_.erase(found);
  ++num_releases_;
  changed_.notify_all();
}

void RecomputeLock::yield_to_backward(Owners owners) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [subject, holders] : holders_)
    for (Holder& each : holders)
      if (is_one_of(each.owner, owners)) ++each.num_waits;
  changed_.notify_all();
}

void RecomputeLock::resume_after_backward(Owners owners) noexcept {
  const auto are_latest = [&] {
    return std::all_of(holders_.begin(), holders_.end(), [&](const auto& subject) {
      const std::vector<Holder>& holders = subject.second;
      return is_one_of(holders.back().owner, owners) ||
             std::none_of(holders.begin(), holders.end(),
                          [&](const Holder& each) { return is_one_of(each.owner, owners); });
    });
  };
  std::unique_lock<std::mutex> lock(mutex_);
  while (!wait_until(are_latest, lock, changed_, std::chrono::hours(1))) {
  }
  for (auto& [subject, holders] : holders_)
    for (Holder& each : holders)
      if (is_one_of(each.owner, owners)) --each.num_waits;
}

RecomputeLock& recompute_lock() {
  static auto* const all = new RecomputeLock;  // leaked: recomputes may run in static destructors
  return *all;
}

void RecomputeHold::acquire(const LockOwner& owner, std::chrono::milliseconds longest_wait) {
  std::sort(subjects_.begin(), subjects_.end(), std::less<>());
  while (has_failed() && recompute_lock().acquire(subjects_[num_held_], owner, longest_wait))
    ++num_held_;
}

void RecomputeHold::release() noexcept {
  while (num_held_ > 0) recompute_lock().release(subjects_[--num_held_]);
}

}  // namespace remat
