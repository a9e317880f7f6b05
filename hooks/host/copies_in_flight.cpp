#include "hooks/host/copies_in_flight.h"

#include <algorithm>
#include <utility>

#include "lib/base/waiting.h"

namespace remat {

void CopiesInFlight::wait_for_others(int64_t bytes) {
  for (;;) {
    std::shared_ptr<const InFlight> oldest;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::erase_if(copies_, [this](const Copy& each) {
        if (!each.done->is_over()) return false;
        bytes_ -= each.bytes;
        return true;
      });
      // Copies that other threads have not queued yet cannot be awaited.
      if (copies_.empty() || bytes <= max_bytes_ - bytes_) {
        bytes_ += bytes;
        return;
      }
      oldest = copies_.front().done;
    }
    const WaitForThread waiting;
    oldest->synchronize();
  }
}

CopiesInFlight::Claim::Claim(CopiesInFlight* copies, int64_t bytes)
    : copies_(copies), bytes_(bytes) {
  if (copies_ != nullptr) copies_->wait_for_others(bytes_);
}

CopiesInFlight::Claim::~Claim() {
  if (copies_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(copies_->mutex_);
  copies_->bytes_ -= bytes_;
}

void CopiesInFlight::Claim::queued(std::shared_ptr<const InFlight> done) {
  if (copies_ == nullptr) return;
  CopiesInFlight& copies = *std::exchange(copies_, nullptr);
  const std::lock_guard<std::mutex> lock(copies.mutex_);
  copies.copies_.push_back({std::move(done), bytes_});
}

}  // namespace remat
