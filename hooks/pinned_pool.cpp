#include "hooks/pinned_pool.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <atomic>
#include <iterator>

#include "lib/seam/warn.h"

namespace remat {

namespace {

constexpr int64_t page = 4096;

/// Larger ones would be wasted on so few bytes.
int64_t largest_for(int64_t size) { return size + size / 2 + page; }

}  // namespace

// Never destroyed: at the end of the process the accelerator may be gone already.
PinnedPool& PinnedPool::get() {
  static auto* const pool = new PinnedPool;
  return *pool;
}

PinnedPool::PinnedPool()
    : max_bytes_(static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) / 4 * ::sysconf(_SC_PAGESIZE)) {}

bool PinnedPool::make_room(int64_t size) {
  while (bytes_ + size > max_bytes_ && !free_.empty()) {
    const auto largest = std::prev(free_.end());
    for (const auto& use : largest->second.uses) use->synchronize();
    bytes_ -= largest->first;
    free_.erase(largest);
  }
  return bytes_ + size <= max_bytes_;
}

std::optional<PinnedBuffer> PinnedPool::take(int64_t size) {
  bool is_short = false;
  std::optional<PinnedBuffer> taken = take(size, is_short);
  static std::atomic<bool> has_warned{false};
  if (is_short && !has_warned.exchange(true))
    seam::warn(c10::str(
        "remat: page-locked memory of the host is short: ", size,
        " bytes could not be had, so copies to and from the device use ordinary memory and wait. At "
        "most a quarter of the machine's memory is page-locked. Do: move less, or give the process "
        "a larger limit of locked memory (ulimit -l)."));
  return taken;
}

std::optional<PinnedBuffer> PinnedPool::take(int64_t size, bool& is_short) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!is_available_) return std::nullopt;
  if (const auto found = free_.lower_bound(size);
      found != free_.end() && found->first <= largest_for(size)) {
    std::optional<PinnedBuffer> buffer(std::move(found->second.bytes));
    buffer->uses = std::move(found->second.uses);
    free_.erase(found);
    return buffer;
  }
  const int64_t room = (size + page - 1) / page * page;
  try {
    is_short = true;
    if (!make_room(room)) return std::nullopt;
    std::optional<PinnedBuffer> buffer(
        at::empty({room}, at::TensorOptions(at::kByte).pinned_memory(true)));
    bytes_ += room;
    is_short = false;
    return buffer;
  } catch (const c10::OutOfMemoryError&) {
  } catch (const c10::Error&) {
    is_short = false;
    is_available_ = false;  // this accelerator has none
  }
  return std::nullopt;
}

PinnedBuffer::~PinnedBuffer() {
  if (!bytes.defined()) return;  // moved from
  PinnedPool& pool = PinnedPool::get();
  const std::lock_guard<std::mutex> lock(pool.mutex_);
  const int64_t size = bytes.numel();
  pool.free_.emplace(size, PinnedPool::Free{std::move(bytes), std::move(uses)});
}

}  // namespace remat
