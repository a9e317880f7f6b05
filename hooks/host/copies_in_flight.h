#pragma once
// Copies to the host that run beside the work, bounded by the bytes that they hold on the device.
//
// Note [Bytes in flight]
// An original that is freed while it is copied cannot be used again before the copy is done, and
// the host runs ahead of the device: without a bound a forward could take as much memory as if
// nothing moved. Letting the device's work wait instead of the host is no bound: an allocator asks
// the host's clock whether a copy is done. Waiting takes nothing from the overlap as long as copies
// are faster than what is computed between them.

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "lib/seam/in_flight.h"

namespace remat {

class CopiesInFlight {
 public:
  explicit CopiesInFlight(int64_t max_bytes) : max_bytes_(max_bytes) {}

  /// The bytes of one copy, which count from here on: until it is done if it was queued, else until
  /// this dies.
  class Claim {
   public:
    /// Waits for the oldest copies. `copies` may be null.
    Claim(CopiesInFlight* copies, int64_t bytes);
    ~Claim();
    Claim& operator=(Claim&&) = delete;
    void queued(std::shared_ptr<const InFlight> done);

   private:
    CopiesInFlight* copies_;
    const int64_t bytes_;
  };

 private:
  struct Copy {
    std::shared_ptr<const InFlight> done;
    int64_t bytes;
  };
  void wait_for_others(int64_t bytes);

  const int64_t max_bytes_;
  std::mutex mutex_;         ///< not held while anybody waits
  std::deque<Copy> copies_;  ///< oldest first
  int64_t bytes_ = 0;        ///< theirs, and what is about to be queued
};

}  // namespace remat
