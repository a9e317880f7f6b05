#pragma once
// Reruns: the content of a dropped value is made again by the calls that made it.

#include "lib/budget/graph.h"

namespace remat::budget {

/// Returns the storage with the value's content, and makes the content again if it was dropped.
/// `save`: the clock at the save that backward reads. The caller owns the value and does not hold
/// the lock.
/// Throws errors of the operators that run, and c10::Error if a source has changed.
c10::Storage content_again(Value& value, Runtime& runtime, double save);

/// Returns the runtime whose values this thread makes again now; or null.
const Runtime* rerun_on_this_thread();

}  // namespace remat::budget
