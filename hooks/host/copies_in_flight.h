#pragma once
// Copies to the host that run beside other work, limited by the bytes that they hold on the device.
//
// Note [Bytes in flight]
// The memory of an original that is freed during its copy cannot be reused before the copy is done.
// Since the host runs ahead of the device, a forward without a bound could take as much memory as
// one without moves. A wait on the device instead of the host is no bound: the allocator checks at
// allocation, on the host, whether a copy is done. The host's wait costs no overlap as long as
// copies are faster than the computations between them.

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "lib/seam/in_flight.h"

namespace remat {

class CopiesInFlight {
 public:
  explicit CopiesInFlight(int64_t max_bytes) : max_bytes_(max_bytes) {}

  /// The bytes of one copy. They count from the construction until the copy is done, if it was
  /// queued; otherwise until this object dies.
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
  std::mutex mutex_;         ///< not held during waits
  std::deque<Copy> copies_;  ///< oldest first
  int64_t bytes_ = 0;        ///< of `copies_` and of copies that will be queued
};

}  // namespace remat
