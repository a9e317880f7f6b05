#include "hooks/host/pinned_pool.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <atomic>
#include <iterator>

#include "hooks/host/host_memory.h"
#include "lib/seam/warn.h"

namespace remat {

namespace {

constexpr int64_t page = 4096;

/// Returns the size of the largest buffer that may serve `size` bytes; a larger one would waste
/// memory.
int64_t largest_for(int64_t size) { return size + size / 2 + page; }

}  // namespace

// The pool is never destroyed: at the end of the process the accelerator may be gone already.
PinnedPool& PinnedPool::get() {
  static auto* const pool = new PinnedPool;
  return *pool;
}

PinnedPool::PinnedPool()
    : max_bytes_(static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) / 4 * ::sysconf(_SC_PAGESIZE)) {}

bool PinnedPool::make_room(int64_t size, int64_t max_bytes) {
  while (bytes_ + size > max_bytes && !free_.empty()) {
    const auto largest = std::prev(free_.end());
    for (const auto& use : largest->second.uses) use->synchronize();
    bytes_ -= largest->first;
    free_.erase(largest);
  }
  return bytes_ + size <= max_bytes;
}

std::optional<PinnedBuffer> PinnedPool::take(int64_t size) {
  Found found = find(size, max_bytes_);
  if (found.is_new) warn_if_host_is_short(0);
  static std::atomic<bool> has_warned{false};
  if (found.is_short && !has_warned.exchange(true))
    seam::warn(c10::str(
        "remat: page-locked memory of the host is short: ", size,
        " bytes could not be allocated, so copies to and from the device go through ordinary "
        "memory, in chunks, on a thread of the library, and take longer. At most a quarter of "
        "the machine's memory is page-locked. Hint: move less, or give the process a larger "
        "limit of locked memory (ulimit -l)."));
  return std::move(found.buffer);
}

std::optional<PinnedBuffer> PinnedPool::take_chunk() {
  constexpr int64_t num_beyond = 2;
  return std::move(find(chunk_bytes, max_bytes_ + num_beyond * chunk_bytes).buffer);
}

PinnedPool::Found PinnedPool::find(int64_t size, int64_t max_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!is_available_) return {};
  if (const auto found = free_.lower_bound(size);
      found != free_.end() && found->first <= largest_for(size)) {
    std::optional<PinnedBuffer> buffer(std::move(found->second.bytes));
    buffer->uses = std::move(found->second.uses);
    free_.erase(found);
    return {.buffer = std::move(buffer)};
  }
  const int64_t room = (size + page - 1) / page * page;
  try {
    if (!make_room(room, max_bytes)) return {.is_short = true};
    std::optional<PinnedBuffer> buffer(
        at::empty({room}, at::TensorOptions(at::kByte).pinned_memory(true)));
    bytes_ += room;
    return {.buffer = std::move(buffer), .is_new = true};
  } catch (const c10::OutOfMemoryError&) {
    return {.is_short = true};
  } catch (const c10::Error&) {
    is_available_ = false;  // this accelerator has no page-locked memory
  }
  return {};
}

PinnedBuffer::~PinnedBuffer() {
  if (!bytes.defined()) return;  // moved from
  PinnedPool& pool = PinnedPool::get();
  const std::lock_guard<std::mutex> lock(pool.mutex_);
  const int64_t size = bytes.numel();
  pool.free_.emplace(size, PinnedPool::Free{std::move(bytes), std::move(uses)});
}

}  // namespace remat
