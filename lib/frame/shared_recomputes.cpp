#include "lib/frame/shared_recomputes.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>
#include <vector>

#include "lib/frame/frame.h"

namespace remat {

namespace {

int64_t next_id() {
  static std::atomic<int64_t> next{0};
  return next.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

SharedRecomputes::SharedRecomputes(TaskKey::Kind kind, int64_t max_bytes)
    : key_{kind, next_id()}, max_bytes_(max_bytes) {}

void SharedRecomputes::forget(const Frame* frame) {
  const auto found = places_.find(frame);
  if (found == places_.end()) return;
  num_bytes_ -= found->second->bytes;
  entries_.erase(found->second);
  places_.erase(found);
}

bool SharedRecomputes::add(const c10::intrusive_ptr<Frame>& frame, int64_t bytes) {
  std::vector<c10::intrusive_ptr<Frame>> dropped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (has_ended_ || bytes > max_bytes_) return false;
    forget(frame.get());
    while (num_bytes_ > max_bytes_ - bytes) {
      const Frame* const least_recent = entries_.front().frame._unsafe_get_target();
      if (auto alive = entries_.front().frame.lock()) dropped.push_back(std::move(alive));
      forget(least_recent);
    }
    // Frames die while it lasts; forgetting them at every doubling keeps the list short.
    if (entries_.size() >= next_sweep_) {
      for (auto each = entries_.begin(); each != entries_.end();) {
        const auto next = std::next(each);
        if (each->frame.expired()) forget(each->frame._unsafe_get_target());
        each = next;
      }
      next_sweep_ = std::max<std::size_t>(64, 2 * entries_.size());
    }
    entries_.push_back({c10::weak_intrusive_ptr<Frame>(frame), bytes});
    places_[frame.get()] = std::prev(entries_.end());
    num_bytes_ += bytes;
  }
  for (const auto& each : dropped) each->end_task(key_);
  return true;
}

void SharedRecomputes::touch(const Frame& frame) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto found = places_.find(&frame); found != places_.end())
    entries_.splice(entries_.end(), entries_, found->second);
}

void SharedRecomputes::end() noexcept {
  std::list<Entry> held;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    has_ended_ = true;
    held.swap(entries_);
    places_.clear();
    num_bytes_ = 0;
  }
  for (const Entry& each : held)
    if (const auto frame = each.frame.lock()) frame->end_task(key_);
}

}  // namespace remat
