#pragma once
// Finds out whether an exception may pass the functions that this thread is in.

namespace remat {

/// Returns false if a function called since `on_stack` was made would end the process when an
/// exception passes it: a noexcept one, like destructors. `on_stack`: an object on this thread's
/// stack. Takes about half as long as a throw. Reads GCC's tables; Clang's noexcept functions look
/// as if they caught everything.
bool can_unwind_to(const void* on_stack);

}  // namespace remat
