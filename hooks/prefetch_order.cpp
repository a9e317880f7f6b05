#include "hooks/prefetch_order.h"

#include <utility>
#include <vector>

#include "hooks/piece.h"

namespace remat {

uint64_t PrefetchOrder::add(const std::shared_ptr<Piece>& piece) {
  const std::lock_guard<std::mutex> lock(mutex_);
  all_.emplace_hint(all_.end(), ++last_number_, piece);
  return last_number_;
}

void PrefetchOrder::remove(uint64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  all_.erase(number);
}

void PrefetchOrder::prefetch_before(uint64_t number) {
  std::vector<std::shared_ptr<Piece>> next, too_many;  // die after the lock, for which they ask
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto each = all_.lower_bound(number); each != all_.begin() && next.size() < depth_;)
      if (auto piece = (--each)->second.lock()) next.push_back(std::move(piece));
  }
  if (next.empty() || !cancels_at_end()) return;
  for (const auto& piece : next) {
    if (!piece->begin_load()) continue;
    const std::lock_guard<std::mutex> lock(mutex_);
    begun_.push_back(piece);
    while (begun_.size() > depth_) {
      if (auto oldest = begun_.front().lock()) too_many.push_back(std::move(oldest));
      begun_.pop_front();
    }
  }
  for (const auto& piece : too_many) piece->cancel_load();
}

bool PrefetchOrder::cancels_at_end() {
  struct AtEnd {
    explicit AtEnd(std::weak_ptr<PrefetchOrder> pieces) : order(std::move(pieces)) {}
    AtEnd& operator=(AtEnd&&) = delete;  // a copy that dies would end the backward
    ~AtEnd() {
      if (const auto alive = order.lock()) alive->cancel_all();
    }
    const std::weak_ptr<PrefetchOrder> order;
  };
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(will_cancel_, true)) return true;
  }
  if (at_end_([at_end = std::make_shared<AtEnd>(weak_from_this())] {})) return true;
  const std::lock_guard<std::mutex> lock(mutex_);
  will_cancel_ = false;
  return false;
}

void PrefetchOrder::cancel_all() {
  std::deque<std::weak_ptr<Piece>> all;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    all.swap(begun_);
    will_cancel_ = false;
  }
  for (const auto& each : all)
    if (const auto piece = each.lock()) piece->cancel_load();
}

}  // namespace remat
