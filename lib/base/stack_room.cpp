#include "lib/base/stack_room.h"

#if defined(__linux__)
#include <pthread.h>
#endif

#include <algorithm>
#include <cstdint>

namespace remat {

namespace {

/// The bounds of the thread's own stack, and the address down to which it has enough room. Empty if
/// they are unknown; code on another stack (a fiber's) is outside and counts as having room.
struct Bounds {
  uintptr_t begin = 0, roomy = 0, end = 0;
  bool is_known = false;
};

Bounds stack_bounds() {
#if defined(__linux__)
  pthread_attr_t attributes;
  if (pthread_getattr_np(pthread_self(), &attributes) != 0) return {0, 0, 0, true};
  void* lowest = nullptr;
  size_t size = 0;
  const bool is_known = pthread_attr_getstack(&attributes, &lowest, &size) == 0;
  pthread_attr_destroy(&attributes);
  if (!is_known) return {0, 0, 0, true};
  const size_t kept = std::clamp<size_t>(size / 4, 48 << 10, 256 << 10);
  const auto begin = reinterpret_cast<uintptr_t>(lowest);
  return {begin, begin + kept, begin + size, true};
#else
  return {0, 0, 0, true};
#endif
}

const Bounds& bounds_of_this_thread() {
  thread_local Bounds of_this_thread;
  Bounds& bounds = of_this_thread;  // one look-up for all
  if (!bounds.is_known) bounds = stack_bounds();
  return bounds;
}

}  // namespace

bool has_stack_room() {
  const Bounds& stack = bounds_of_this_thread();
  const auto here = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  return here < stack.begin || here >= stack.roomy;
}

bool is_in_callers_frames(uintptr_t address) {
  const auto here = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  return address > here && address < bounds_of_this_thread().end;
}

}  // namespace remat
