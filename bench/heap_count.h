#pragma once
// The heap bytes that the calling thread takes. Defines malloc: for one source of a program.

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__GLIBC__)
#define REMAT_BENCH_COUNTS_HEAP 1
#include <malloc.h>
#else
#define REMAT_BENCH_COUNTS_HEAP 0
#endif

namespace bench {

struct HeapCount {
  int64_t bytes = 0;   ///< of blocks that are still taken, with malloc's rounding and its word
  int64_t blocks = 0;  ///< blocks that are still taken
};

/// Counts the blocks that this thread takes and frees, for its lifetime. One at a time.
class HeapCounter {
 public:
  HeapCounter() { state() = {.is_counting = true}; }
  ~HeapCounter() { state().is_counting = false; }
  HeapCounter& operator=(HeapCounter&&) = delete;
  HeapCount count() const { return state().count; }

  /// Called by malloc and free; allocates nothing itself.
  static void note(std::size_t usable_bytes, int64_t blocks) {
    State& now = state();
    if (!now.is_counting) return;
    now.count.blocks += blocks;
    now.count.bytes += blocks * static_cast<int64_t>(usable_bytes + sizeof(std::size_t));
  }

 private:
  struct State {
    bool is_counting = false;
    HeapCount count{};
  };
  static State& state() {
    static thread_local constinit State of_thread;
    return of_thread;
  }
};

}  // namespace bench

#if REMAT_BENCH_COUNTS_HEAP
// A program's own malloc comes before that of the C library for every library that it loads,
// operator new included. The C library still does the work.
extern "C" {
void* __libc_malloc(std::size_t bytes);
void* __libc_calloc(std::size_t count, std::size_t bytes);
void* __libc_realloc(void* block, std::size_t bytes);
void* __libc_memalign(std::size_t alignment, std::size_t bytes);
void __libc_free(void* block);

inline void* bench_taken(void* block) noexcept {
  if (block != nullptr) bench::HeapCounter::note(malloc_usable_size(block), 1);
  return block;
}
void* malloc(std::size_t bytes) noexcept { return bench_taken(__libc_malloc(bytes)); }
void* calloc(std::size_t count, std::size_t bytes) noexcept {
  return bench_taken(__libc_calloc(count, bytes));
}
void* memalign(std::size_t alignment, std::size_t bytes) noexcept {
  return bench_taken(__libc_memalign(alignment, bytes));
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) noexcept {
  return memalign(alignment, bytes);
}
int posix_memalign(void** block, std::size_t alignment, std::size_t bytes) noexcept {
  void* const taken = memalign(alignment, bytes);
  if (taken == nullptr) return ENOMEM;
  *block = taken;
  return 0;
}
void free(void* block) noexcept {
  if (block != nullptr) bench::HeapCounter::note(malloc_usable_size(block), -1);
  __libc_free(block);
}
void* realloc(void* block, std::size_t bytes) noexcept {
  if (block != nullptr) bench::HeapCounter::note(malloc_usable_size(block), -1);
  void* const moved = __libc_realloc(block, bytes);
  // After a failure the old block is still there.
  if (moved == nullptr && bytes != 0) return bench_taken(block), nullptr;
  return bench_taken(moved);
}
}
#endif

namespace bench {

/// Takes blocks that no counter sees, neither when they are taken nor when they are freed.
#if REMAT_BENCH_COUNTS_HEAP
inline void* take_uncounted(std::size_t alignment, std::size_t bytes) {
  void* const block = __libc_memalign(alignment, bytes);
  if (block == nullptr) throw std::bad_alloc();
  return block;
}
inline void give_back_uncounted(void* block) { __libc_free(block); }
#else
inline void* take_uncounted(std::size_t alignment, std::size_t bytes) {
  // aligned_alloc requires whole multiples.
  void* const block =
      std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (block == nullptr) throw std::bad_alloc();
  return block;
}
inline void give_back_uncounted(void* block) { std::free(block); }
#endif

}  // namespace bench
