#pragma once
// Warns about a function that refers to its caller's local variables, which may be gone when
// backward runs it again.

#include <string>

#include "remat/binding.h"

namespace remat {

/// Searches the function object for addresses of this thread's stack, and warns about them once per
/// region name.
void warn_of_stack_captures(const FunctionFacts& facts, const std::string& name);

}  // namespace remat
