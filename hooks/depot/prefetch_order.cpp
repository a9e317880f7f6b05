#include "hooks/depot/prefetch_order.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "hooks/depot/piece.h"
#include "hooks/depot/staying.h"

namespace remat {

PrefetchOrder::PrefetchOrder(std::size_t depth, std::shared_ptr<Staying> staying,
                             AtEndOfBackward at_end)
    : depth_(depth), staying_(std::move(staying)), at_end_(at_end) {}

uint64_t PrefetchOrder::next_number() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ++last_number_;
}

void PrefetchOrder::add(uint64_t number, const std::shared_ptr<Piece>& piece) {
  const std::lock_guard<std::mutex> lock(mutex_);
  all_.insert_or_assign(number, piece);
}

void PrefetchOrder::remove(uint64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  all_.erase(number);
}

void PrefetchOrder::prefetch_before(uint64_t number) {
  Further further;  // dies after the lock, which dying pieces take
  const Pieces window = window_before(number, further);
  begin(window, further.to_host);
}

void PrefetchOrder::begin_all() {
  Pieces all;  // dies after the lock, which dying pieces take
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto each = all_.rbegin(); each != all_.rend(); ++each)
      if (auto piece = each->second.lock()) all.push_back(std::move(piece));
  }
  begin(all, {});
}

void PrefetchOrder::begin(const Pieces& next, const Pieces& to_host) {
  if ((next.empty() && to_host.empty()) || !cancels_at_end()) return;
  Pieces too_many;  // die after the lock, which dying pieces take
  for (const auto& piece : next) {
    if (!piece->begin_load()) continue;
    const std::lock_guard<std::mutex> lock(mutex_);
    begun_.push_back(piece);
    while (begun_.size() > next.size()) {
      if (auto oldest = begun_.front().lock()) too_many.push_back(std::move(oldest));
      begun_.pop_front();
    }
  }
  for (const auto& piece : too_many) piece->cancel_load();
  for (const auto& piece : to_host) {
    if (!piece->begin_approach()) continue;
    const std::lock_guard<std::mutex> lock(mutex_);
    approaching_.push_back(piece);
  }
}

/// Returns the pieces to load when `number` is read, the nearest first, and sets the pieces to load
/// to the host.
PrefetchOrder::Pieces PrefetchOrder::window_before(uint64_t number, Further& further) {
  Pieces window;
  std::shared_ptr<Piece> piece;  // dies after the lock, which a dying piece takes
  int64_t room = 0;
  c10::Device device = c10::kCPU;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto each = all_.lower_bound(number); each != all_.begin();) {
    if (staying_ == nullptr && window.size() == depth_) break;
    piece = (--each)->second.lock();
    if (piece == nullptr) continue;
    if (staying_ != nullptr) {
      if (window.empty() || piece->device() != device) {
        device = piece->device();
        room = staying_->room(device);
      }
      room -= piece->num_bytes();
    }
    if (window.size() >= depth_ && room < 0) {
      if (!piece->device().is_cpu()) look_for_room_on_host(each->first + 1, further);
      break;
    }
    window.push_back(std::move(piece));
  }
  return window;
}

/// Finds the pieces below `number` for which the host has room.
void PrefetchOrder::look_for_room_on_host(uint64_t number, Further& further) {
  int64_t room = staying_->room(c10::kCPU);
  for (auto each = all_.lower_bound(std::min(number, looked_down_to_));
       room > 0 && each != all_.begin();) {
    --each;
    if (auto piece = each->second.lock()) {
      const int64_t bytes = piece->bytes_to_approach();
      room -= bytes;
      (bytes > 0 && room >= 0 ? further.to_host : further.others).push_back(std::move(piece));
      if (room < 0) return;
    }
    looked_down_to_ = each->first;
  }
}

bool PrefetchOrder::cancels_at_end() {
  struct AtEnd {
    explicit AtEnd(std::weak_ptr<PrefetchOrder> pieces) : order(std::move(pieces)) {}
    // The death of a copy would count as the end of the backward.
    AtEnd& operator=(AtEnd&&) = delete;
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
    all.insert(all.end(), approaching_.begin(), approaching_.end());
    approaching_.clear();
    looked_down_to_ = std::numeric_limits<uint64_t>::max();
    will_cancel_ = false;
  }
  for (const auto& each : all)
    if (const auto piece = each.lock()) piece->cancel_load();
}

}  // namespace remat
