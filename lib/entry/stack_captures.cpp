#include "lib/entry/stack_captures.h"

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstring>

#include "lib/base/once_per_name.h"
#include "lib/base/stack_room.h"
#include "lib/seam/warn.h"

namespace remat {

namespace {

bool holds_stack_address(const FunctionFacts& facts) {
  const auto* const bytes = static_cast<const char*>(facts.object);
  for (std::size_t at = 0; at + sizeof(uintptr_t) <= facts.num_bytes; at += sizeof(uintptr_t)) {
    uintptr_t word = 0;
    std::memcpy(&word, bytes + at, sizeof word);
    if (is_in_callers_frames(word)) return true;
  }
  return false;
}

}  // namespace

void warn_of_stack_captures(const FunctionFacts& facts, const std::string& name) {
  if (!holds_stack_address(facts)) return;
  static OncePerName warned;
  if (!warned.is_first(name)) return;
  seam::warn(c10::str(
      "remat::checkpoint: the function of ",
      name.empty() ? "a region without a name" : "region \"" + name + "\"",
      " holds the address of a local variable of its caller. Cause: the function captures by "
      "reference ([&]), or captures a pointer to an object on the stack. Backward runs the "
      "function again, and crashes if the variable no longer exists. Hint: capture by value "
      "([=]; a module's holder is a shared pointer), or pass the variable as an argument. If "
      "backward ends before the variable does, no change is needed."));
}

}  // namespace remat
