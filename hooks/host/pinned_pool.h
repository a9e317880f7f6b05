#pragma once
// A pool of page-locked host memory for copies to and from an accelerator.

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

/// A range of page-locked memory, which returns to the pool when the buffer dies.
class PinnedBuffer {
 public:
  explicit PinnedBuffer(at::Tensor memory) : bytes(std::move(memory)) {}
  ~PinnedBuffer();
  PinnedBuffer(PinnedBuffer&&) = default;
  PinnedBuffer& operator=(PinnedBuffer&&) = delete;

  at::Tensor bytes;
  /// The last copies from and to the buffer. They may still run: the next copy must wait for them.
  std::vector<std::shared_ptr<const Ready>> uses;
};

/// The process's pool, for any thread. Page-locking is slow, so the pool keeps returned memory. It
/// takes at most a quarter of the machine's memory, since other code cannot use page-locked memory.
class PinnedPool {
 public:
  static PinnedPool& get();
  /// Returns a buffer of at least `size` bytes. Empty, with one warning, if there is no memory
  /// left; also empty if the accelerator has no page-locked memory.
  std::optional<PinnedBuffer> take(int64_t size);
  /// Returns a buffer for a chunk. The pool reserves memory for chunks beyond the limit of `take`.
  /// Does not warn.
  std::optional<PinnedBuffer> take_chunk();
  static constexpr int64_t chunk_bytes = 4 << 20;

 private:
  PinnedPool();
  struct Found {
    std::optional<PinnedBuffer> buffer{};
    bool is_new = false;    ///< whether the memory was newly page-locked
    bool is_short = false;  ///< whether there is page-locked memory, but not enough
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
