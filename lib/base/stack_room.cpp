#include "lib/base/stack_room.h"

#if defined(__linux__)
#include <pthread.h>
#endif

#include <algorithm>
#include <cstdint>

namespace remat {

namespace {

/// The part of the thread's own stack that is too near its end. Empty where it is not known; code
/// that runs on a stack of its own (a fiber's) is outside and has room.
struct Range {
  uintptr_t begin = 0, end = 0;
  bool is_known = false;
};

Range cramped_addresses() {
#if defined(__linux__)
  pthread_attr_t attributes;
  if (pthread_getattr_np(pthread_self(), &attributes) != 0) return {0, 0, true};
  void* lowest = nullptr;
  size_t size = 0;
  const bool is_known = pthread_attr_getstack(&attributes, &lowest, &size) == 0;
  pthread_attr_destroy(&attributes);
  if (!is_known) return {0, 0, true};
  const size_t kept = std::clamp<size_t>(size / 4, 48 << 10, 256 << 10);
  return {reinterpret_cast<uintptr_t>(lowest), reinterpret_cast<uintptr_t>(lowest) + kept, true};
#else
  return {0, 0, true};
#endif
}

}  // namespace

bool has_stack_room() {
  thread_local Range of_this_thread;
  Range& cramped = of_this_thread;  // one look-up for all
  if (!cramped.is_known) cramped = cramped_addresses();
  const auto here = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  return here < cramped.begin || here >= cramped.end;
}

}  // namespace remat
