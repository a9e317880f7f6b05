#pragma once
// True if an exception may pass the functions that this thread is in.

namespace remat {

/// Returns false if a function that was called since `on_stack` came to be would end the process
/// when an exception passes it: a noexcept one, as destructors are. `on_stack`: an object on this
/// thread's stack. Takes about half as long as to throw. Knows what GCC writes; Clang's noexcept
/// functions look as if they caught everything.
bool can_unwind_to(const void* on_stack);

}  // namespace remat
