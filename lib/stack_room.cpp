#include "lib/stack_room.h"

#if defined(__linux__)
#include <pthread.h>
#endif

#include <algorithm>
#include <cstdint>

namespace remat {

namespace {

/// The lowest address a stack may grow to and still be called roomy; 0: unknown.
uintptr_t lowest_roomy_address() {
#if defined(__linux__)
  pthread_attr_t attributes;
  if (pthread_getattr_np(pthread_self(), &attributes) != 0) return 0;
  void* lowest = nullptr;
  size_t size = 0;
  const bool is_known = pthread_attr_getstack(&attributes, &lowest, &size) == 0;
  pthread_attr_destroy(&attributes);
  if (!is_known) return 0;
  const size_t kept = std::clamp<size_t>(size / 4, 48 << 10, 256 << 10);
  return reinterpret_cast<uintptr_t>(lowest) + kept;
#else
  return 0;
#endif
}

}  // namespace

bool has_stack_room() {
  thread_local const uintptr_t limit = lowest_roomy_address();
  const char here = 0;
  return reinterpret_cast<uintptr_t>(&here) > limit;
}

}  // namespace remat
