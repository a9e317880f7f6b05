// The CPU allocator that counts and limits.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/COW.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "lib/observe/counted_memory.h"
#include "lib/observe/memory_source.h"
#include "lib/observe/recording.h"
#include "lib/observe/report_text.h"

#if defined(__GNUC__) || defined(__clang__)
#define REMAT_NO_SANITIZE __attribute__((no_sanitize("address", "thread")))
#else
#define REMAT_NO_SANITIZE
#endif

namespace remat {
namespace {

// Note [A header in front of the data]
// A counting allocator must find the size of an allocation again when it is freed. A context object
// of the DataPtr is the obvious place. But two users of the allocator need the context to be the
// data pointer itself: oneDNN takes and returns its buffers by `raw_allocate` / `raw_deallocate`,
// and copy-on-write storage asserts it. A table from pointers to sizes would need a lock in every
// allocation. So the size is in the 64 bytes before the data.
//
// `raw_deallocate` may also receive memory from before this allocator was installed, which lacks
// the mark in the header. Looking for the mark before a foreign pointer is safe because the search
// stays within one page: counted data never starts in the first 64 bytes of a page.
//
// The mark is stored last with release and read first with acquire. So the thread that frees sees
// the header that the allocating thread wrote, without other synchronization.
struct Header {
  std::atomic<uint64_t> mark{0};  // first: is_counted() reads it before it knows of a Header
  int64_t bytes = 0;
  at::DataPtr previous;
  const void* storage = nullptr;  // a note beside the data: note_storage_beside
};

constexpr size_t kHeaderBytes = 64;  // keeps the alignment of c10's CPU allocator
constexpr size_t kPageBytes = 4096;
static_assert(sizeof(Header) <= kHeaderBytes && alignof(Header) <= kHeaderBytes);

bool is_header_within_page(const char* data) {
  return reinterpret_cast<uintptr_t>(data) % kPageBytes >= kHeaderBytes;
}

Header* header_of(void* data) {
  return std::launder(reinterpret_cast<Header*>(static_cast<char*>(data) - kHeaderBytes));
}

uint64_t mark_of(const void* data) {
  return reinterpret_cast<uintptr_t>(data) ^ 0x72656d61745f6d65;  // arbitrary
}

// The bytes before a foreign pointer may be a red zone of the address sanitizer, or freed memory to
// the thread sanitizer.
REMAT_NO_SANITIZE bool is_counted(void* data) {
  if (reinterpret_cast<uintptr_t>(data) % alignof(Header) != 0) return false;
  if (!is_header_within_page(static_cast<char*>(data))) return false;
  const auto* mark = reinterpret_cast<uint64_t*>(static_cast<char*>(data) - kHeaderBytes);
  return __atomic_load_n(mark, __ATOMIC_ACQUIRE) == mark_of(data);
}

void raise_to(std::atomic<int64_t>& peak, int64_t bytes) {
  int64_t seen = peak.load();
  while (seen < bytes && !peak.compare_exchange_weak(seen, bytes)) {
  }
}

std::string readable(int64_t bytes) {
  if (bytes < 1'000'000) return fmt::format("{} bytes", bytes);
  return fmt::format("{} bytes ({:.2f} MB)", bytes, static_cast<double>(bytes) / 1e6);
}

const AllocationCallbacks* callbacks = nullptr;  // set once, before any storage is noted
std::atomic<int64_t> num_announced{0};           // users of `begins`

class CountingAllocator final : public at::Allocator, public MemorySource {
 public:
  explicit CountingAllocator(at::Allocator& previous) : previous_(previous) {}

  at::DataPtr allocate(size_t bytes) override;
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  const at::Allocator& previous() const { return previous_; }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    previous_.copy_data(dest, src, count);
  }

  int64_t live_bytes() const override { return live_bytes_.load(); }
  int64_t start_peak() override;
  int64_t peak_bytes() const override { return peak_bytes_.load(); }
  bool is_exact() const override { return true; }
  int64_t num_failed() const override { return num_failed_.load(); }
  MemoryNow now() const override { return {live_bytes(), peak_bytes(), num_failed()}; }
  std::optional<int64_t> free_bytes() override {
    const int64_t limit = limit_bytes_.load();
    if (limit == no_limit) return std::nullopt;
    return std::max<int64_t>(limit - live_bytes_.load(), 0);
  }
  void set_limit(int64_t bytes) override { limit_bytes_.store(bytes); }

 private:
  static void release(void* data);
  int64_t reserve(int64_t bytes);

  at::Allocator& previous_;
  std::atomic<int64_t> live_bytes_{0};
  std::atomic<int64_t> peak_bytes_{0};
  std::atomic<int64_t> limit_bytes_{no_limit};
  std::atomic<int64_t> num_failed_{0};
};

// Leaked: tensors outlive static objects.
CountingAllocator& counting_allocator() {
  static CountingAllocator& allocator = *[] {
    auto* const made = new CountingAllocator(*c10::GetCPUAllocator());
    c10::SetCPUAllocator(made, /*priority=*/255);
    return made;
  }();
  return allocator;
}

[[noreturn]] void throw_out_of_memory(int64_t bytes, int64_t live, int64_t limit) {
  const FailedAllocation failed = KeptBytes::all().failed(c10::kCPU, bytes, live);
  TORCH_CHECK_WITH(
      OutOfMemoryError, false,
      "remat::MemoryLimitGuard: out of memory: an allocation did not fit under the "
      "limit.\n  asked for: ",
      readable(bytes), "\n  live:      ", readable(live), "\n  limit:     ", readable(limit), "\n",
      failed.held.empty() ? "" : text_of(failed) + "\n",
      "Hint: checkpoint more of the model (remat::checkpoint), use a smaller batch, or "
      "raise the limit.");
}

int64_t CountingAllocator::reserve(int64_t bytes) {
  int64_t live = live_bytes_.load();
  for (;;) {
    const int64_t limit = limit_bytes_.load();
    if (limit != no_limit && (bytes > limit || live > limit - bytes)) {
      num_failed_.fetch_add(1);
      if (is_recording()) recording::allocation_fails(bytes, live);
      throw_out_of_memory(bytes, live, limit);
    }
    if (live_bytes_.compare_exchange_weak(live, live + bytes)) return live + bytes;
  }
}

at::DataPtr CountingAllocator::allocate(size_t bytes) {
  // Room for the header, and to move the data out of a page's first bytes.
  constexpr size_t kExtraBytes = 2 * kHeaderBytes;
  if (bytes == 0 || bytes > std::numeric_limits<int64_t>::max() - kExtraBytes) {
    at::DataPtr nothing = previous_.allocate(bytes);  // null, or its own error
    return nothing ? std::move(nothing) : at::DataPtr(nullptr, nullptr, &release, nothing.device());
  }
  const auto counted = static_cast<int64_t>(bytes);
  if (num_announced.load(std::memory_order_acquire) > 0)
    callbacks->begins(counted, live_bytes_.load());
  const int64_t live = reserve(counted);
  at::DataPtr memory;
  try {
    memory = previous_.allocate(bytes + kExtraBytes);
  } catch (...) {
    live_bytes_.fetch_sub(counted);
    throw;
  }
  raise_to(peak_bytes_, live);
  if (is_recording()) recording::memory_changes(live);

  char* data = static_cast<char*>(memory.get()) + kHeaderBytes;
  if (!is_header_within_page(data)) data += kHeaderBytes;
  const at::Device device = memory.device();
  auto* header = new (data - kHeaderBytes) Header{{}, counted, std::move(memory)};
  header->mark.store(mark_of(data), std::memory_order_release);
  return {data, data, &release, device};
}

void CountingAllocator::release(void* data) {
  CountingAllocator& self = counting_allocator();
  if (!is_counted(data)) {
    if (const at::DeleterFnPtr previous_release = self.previous_.raw_deleter())
      previous_release(data);
    return;
  }
  Header* header = header_of(data);
  if (header->storage != nullptr && callbacks->freed(header->storage, data)) return;
  const int64_t bytes = header->bytes;
  at::DataPtr memory = std::move(header->previous);
  header->mark.store(0, std::memory_order_relaxed);
  header->~Header();
  memory.clear();
  const int64_t live = self.live_bytes_.fetch_sub(bytes) - bytes;
  if (is_recording()) recording::memory_changes(live);
}

int64_t CountingAllocator::start_peak() {
  const int64_t last = peak_bytes_.exchange(live_bytes_.load());
  raise_to(peak_bytes_, live_bytes_.load());  // bytes that another thread allocated in between
  return last;
}

}  // namespace

MemorySource& cpu_memory() { return counting_allocator(); }

void set_allocation_callbacks(const AllocationCallbacks& all) {
  counting_allocator();
  callbacks = &all;
}

at::DataPtr take_over(const void* data) {
  void* const owned = const_cast<void*>(data);
  header_of(owned)->storage = nullptr;
  return {owned, owned, counting_allocator().raw_deleter(), c10::Device(c10::kCPU)};
}

void want_announcements(bool more) { num_announced.fetch_add(more ? 1 : -1); }

bool is_end_told(const c10::StorageImpl& storage) {
  const at::DataPtr& data = storage.data_ptr();
  return data.get() != nullptr && data.get_deleter() == counting_allocator().raw_deleter() &&
         is_counted(data.get());
}

void note_storage_beside(const c10::StorageImpl& storage) {
  if (is_end_told(storage)) header_of(storage.data_ptr().get())->storage = &storage;
}

bool is_cpu_memory_of_torch(const c10::StorageImpl& storage) {
  const at::DeleterFnPtr deleter = storage.data_ptr().get_deleter();
  return deleter == counting_allocator().raw_deleter() ||
         deleter == counting_allocator().previous().raw_deleter() ||
         c10::impl::cow::is_cow_data_ptr(storage.data_ptr());
}

}  // namespace remat
