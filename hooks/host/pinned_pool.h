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

#include "lib/seam/ready.h"

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
  /// At least so many bytes; none if there are no more, which is warned about once, or the
  /// accelerator has no such memory.
  std::optional<PinnedBuffer> take(int64_t size);
  /// The same for what goes through it in chunks: there is some when all that others may have is
  /// taken. Not warned about.
  std::optional<PinnedBuffer> take_chunk();
  static constexpr int64_t chunk_bytes = 4 << 20;

 private:
  PinnedPool();
  struct Found {
    std::optional<PinnedBuffer> buffer{};
    bool is_new = false;    ///< memory that was not page-locked before
    bool is_short = false;  ///< there is some, but not so much
  };
  Found find(int64_t size, int64_t max_bytes);
  bool make_room(int64_t size, int64_t max_bytes);
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
