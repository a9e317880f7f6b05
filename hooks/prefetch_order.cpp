#include "hooks/prefetch_order.h"

#include <utility>
#include <vector>

#include "hooks/piece.h"
#include "hooks/staying.h"

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

void PrefetchOrder::prefetch_before(uint64_t number) { begin(window_before(number)); }

void PrefetchOrder::begin_all() {
  std::vector<std::shared_ptr<Piece>> all;  // dies after the lock, for which they ask
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto each = all_.rbegin(); each != all_.rend(); ++each)
      if (auto piece = each->second.lock()) all.push_back(std::move(piece));
  }
  begin(all);
}

void PrefetchOrder::begin(const std::vector<std::shared_ptr<Piece>>& next) {
  if (next.empty() || !cancels_at_end()) return;
  std::vector<std::shared_ptr<Piece>> too_many;  // die after the lock, for which they ask
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
}

/// Those that are to be on their way when `number` is read, the nearest first.
std::vector<std::shared_ptr<Piece>> PrefetchOrder::window_before(uint64_t number) {
  std::vector<std::shared_ptr<Piece>> window;
  std::shared_ptr<Piece> piece;  // dies after the lock, for which it asks
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
    if (window.size() >= depth_ && room < 0) break;
    window.push_back(std::move(piece));
  }
  return window;
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
