#pragma once
// Page-locked memory of the host that copies to and from an accelerator use, again and again.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "hooks/ready.h"

namespace remat {

/// A buffer is a range of page-locked memory. Goes back to the pool when it dies.
class PinnedBuffer {
 public:
  explicit PinnedBuffer(at::Tensor memory) : bytes(std::move(memory)) {}
  ~PinnedBuffer();
  PinnedBuffer(PinnedBuffer&&) = default;
  PinnedBuffer& operator=(PinnedBuffer&&) = delete;

  at::Tensor bytes;
  /// The last copies from and to it are listed here. They may not be done: the next one must wait
  /// for them.
  std::vector<std::shared_ptr<const Ready>> uses;
};

/// The process has one pool, for any thread. Page-locking is slow, so memory that comes back is
/// kept; never more than a quarter of the machine's memory in all, since nothing else can use it.
class PinnedPool {
 public:
  static PinnedPool& get();
  /// At least so many bytes; none if there are no more, which is warned about once, or the accelerator has
  /// no such memory.
  std::optional<PinnedBuffer> take(int64_t size);

 private:
  PinnedPool();
  std::optional<PinnedBuffer> take(int64_t size, bool& is_short);
  bool make_room(int64_t size);
  friend class PinnedBuffer;
  struct Free {
    at::Tensor bytes;
    std::vector<std::shared_ptr<const Ready>> uses;
  };

  const int64_t max_bytes_;
  std::mutex mutex_;
  std::multimap<int64_t, Free> free_;  ///< by size
  int64_t bytes_ = 0;                  ///< free and taken
  bool is_available_ = true;
};

}  // namespace remat
