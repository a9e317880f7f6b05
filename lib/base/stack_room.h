#pragma once
// Measures the rest of the calling thread's stack, so that deep nesting ends in an error.

#include <cstddef>
#include <cstdint>

namespace remat {

/// Returns whether another region may be opened or recomputed on this thread. The reserve is enough
/// for an operator, an exception and its text: a quarter of the stack, between 48 and 256 KiB.
/// Always true if the C library does not report the bounds of a stack.
bool has_stack_room();

/// Returns whether an address lies in the frame of a function that called this one, on the thread's
/// own stack. False if the bounds are unknown.
bool is_in_callers_frames(uintptr_t address);

}  // namespace remat
