#pragma once
// How much of the calling thread's stack is left, so that deep nesting ends in an error.

#include <cstddef>
#include <cstdint>

namespace remat {

/// Whether another region may be opened or recomputed on this thread. What is kept back is enough
/// for an operator, an exception and its text: a quarter of the stack, between 48 and 256 KiB.
/// Always true where the C library does not tell the bounds of a stack.
bool has_stack_room();

/// Whether an address lies in the frame of a function that called this one, on the thread's own
/// stack. False where the bounds are not known.
bool is_in_callers_frames(uintptr_t address);

}  // namespace remat
