#pragma once
// Makes the content of a value again, by running the calls that made it.

#include "lib/budget/graph.h"

namespace remat::budget {

/// The storage that has the value's content, made again if it must be. `save`: the clock at the save
/// that is read. The caller owns the value. Runs operators. Throws what an operator throws, and an
/// error if a source has changed.
c10::Storage content_again(Value& value, Runtime& runtime, double save);

/// The budget whose values this thread makes again now; or null.
const Runtime* rerun_on_this_thread();

}  // namespace remat::budget
