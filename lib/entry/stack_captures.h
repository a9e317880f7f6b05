#pragma once
// Warns of a function that refers to its caller's local variables, which may be gone when backward
// runs it again.

#include <string>

#include "remat/binding.h"

namespace remat {

/// Looks for addresses of this thread's stack in the function object, and warns of one once a
/// region's name.
void warn_of_stack_captures(const FunctionFacts& facts, const std::string& name);

}  // namespace remat
